// Codes of K and V as operands of mma.sync, for forward_few_rows.cuh. A lane reads words of two keys, lane /
// 4 and eight more; its codes become pairs for the left operand (few_rows_pairs.cuh), in an order of columns
// that Q's follow. For V words are transposed first, so that a pair has two keys of a column. Scales of
// blocks of 32 columns and more multiply sums over a block, and P; smaller blocks' multiply elements.
#pragma once

#include "flashjit/sm90/few_rows_zeros.cuh"
#include "flashjit/sm90/forward_rings.cuh"
#include "flashjit/sm90/forward_rows.cuh"
#include "flashjit/sm90/kv_scale_rows.cuh"

namespace flashjit::sm90 {

// --- Rows in slots ----------------------------------------------------------------------------------------

/// From a lane's key to the next lane's: neighbours, but where rows of an odd number of words, or of twice
/// one, would then share banks. Keys that share scales are a warp's own.
template <class Format>
constexpr int kKeyStepOf = Format::kAlignment >= 8    ? 1
                           : Format::kBytes % 8 == 4  ? 4
                           : Format::kBytes % 16 == 8 ? 2
                                                      : 1;
template <class P, bool kDecodes = kDecodesKv<P>>
constexpr int kKeyStep = 1;
template <class P>
constexpr int kKeyStep<P, true> = P::KFormat::kKeys > 0
                                      ? 1
                                      : max(kKeyStepOf<typename P::KFormat>, kKeyStepOf<typename P::VFormat>);
/// The lane's key i of two of a tile's; `first` is the warp's times sixteen.
template <class P>
__device__ __forceinline__ int key_of_lane(int first, int i) {
  const int own = static_cast<int>(threadIdx.x) % 32 / 4;
  if (kKeyStep<P> == 2) return first + own * 2 + i;
  if (kKeyStep<P> == 4) return first / 64 * 64 + first / 16 % 4 + own * 4 + i * 32;
  return first + own + i * 8;
}

/// Where the lane's two keys of a slot's rows are, and the rows that have their scales.
template <class P, class Format>
struct TwoRows {
  const unsigned char *of[2], *scales[2];

  __device__ __forceinline__ TwoRows(const RowSlot<P>& from, int first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = key_of_lane<P>(first, i);
      of[i] = reinterpret_cast<const unsigned char*>(from.rows) + from.begins[row];
      scales[i] = Format::kApart ? TileScales<P, Format>::of_row(from, row) : of[i];
    }
  }
};
/// Words of a row that begins at a multiple of four bytes; or of two, where words around it are read.
template <bool kAligned>
struct RowWords {
  const unsigned char* row;

  __device__ __forceinline__ unsigned at(int offset) const {
    return *reinterpret_cast<const unsigned*>(row + offset);
  }
};
template <>
struct RowWords<false> {
  const unsigned char* row;  ///< at a multiple of four
  unsigned selected;

  __device__ __forceinline__ RowWords(const unsigned char* begin) {
    const unsigned ahead = static_cast<unsigned>(reinterpret_cast<unsigned long long>(begin)) & 2u;
    row = begin - ahead, selected = 0x3210u + ahead * 0x1111u;
  }
  __device__ __forceinline__ unsigned at(int offset) const {
    const auto* words = reinterpret_cast<const unsigned*>(row + (offset & ~3));
    return select_bytes(words[0], words[1], selected + offset % 4 * 0x1111u);
  }
};
/// Words of the four groups of 32 columns of a row: the lane's eight columns of each. Eight of 2 bits become
/// a word of four and four.
template <class Format, int kWords>
__device__ __forceinline__ void load_words(const unsigned char* row, unsigned (&to)[4][kWords]) {
  const int own = static_cast<int>(threadIdx.x) % 4;
  if (Format::kBits == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = Format::kCodes + i * 32 / Format::kBlock * Format::kBlockStep +
                     i * 32 % Format::kBlock / 4 + own * 2;
      to[i][0] = select_bytes(*reinterpret_cast<const unsigned short*>(row + at), 0u, 0x4140);
    }
    return;
  }
  const RowWords<Format::kAlignment % 4 == 0> of_lane{
      row + (Format::kBlock >= 32 ? own * 4 : own / 2 * Format::kBlockStep + own % 2 * 4)};
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int half = 0; half < kWords; ++half)
      to[i][half] = of_lane.at(Format::kCodes + i * 32 / Format::kBlock * Format::kBlockStep +
                               i * 32 % Format::kBlock * Format::kBits / 8 + half * 16);
}
/// The lane's words of two keys of K, with scales of groups or the lane's own as factors.
template <class P, class Codes, class Format, bool kScalesSums = Codes::kScalesSums>
struct HeldKeys {
  unsigned words[2][4][Codes::kWords];
  GroupScales<Format> scales[2];
  GroupZeros<Codes, Format> zeros;

  __device__ __forceinline__ void load(const TwoRows<P, Format>& rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_words<Format>(rows.of[i], words[i]);
      scales[i].load(rows.scales[i]);
      zeros.load(rows.scales[i], i);
    }
  }
};
template <class P, class Codes, class Format>
struct HeldKeys<P, Codes, Format, false> {
  unsigned words[2][4][1], scales[2];

  __device__ __forceinline__ void load(const TwoRows<P, Format>& rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_words<Format>(rows.of[i], words[i]);
      unsigned all[2];
      if (Format::kScaleAlignment < 4)
        load_shifted(rows.scales[i] + Format::kScales, all);
      else
        load_bytes<8, Format::kScaleAlignment>(rows.scales[i] + Format::kScales, all);
      scales[i] = select_bytes(all[0], all[1], threadIdx.x % 4 < 2 ? 0x6420 : 0x7531);
    }
  }
};
/// Words of keys that share scales, which are read as they are used.
template <class P, class Codes, class Format>
struct HeldChannelKeys {
  unsigned words[2][4][1];
  const unsigned char* scales;

  __device__ __forceinline__ void load(const TwoRows<P, Format>& rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_words<Format>(rows.of[i], words[i]);
    scales = rows.scales[0];
  }
};
/// Words of V: a pair of codes of two keys, which transposing brings together.
template <class P, class Codes, class Format, bool kScalesSums = Codes::kScalesSums>
struct HeldValues : HeldKeys<P, Codes, Format> {
  __device__ __forceinline__ void load(const TwoRows<P, Format>& rows) {
    HeldKeys<P, Codes, Format>::load(rows);
#pragma unroll
    for (auto& row : this->words)
#pragma unroll
      for (auto& group : row)
#pragma unroll
        for (unsigned& word : group) word = transposed_matrix(word);
    this->zeros.transpose();
  }
};
template <class P, class Codes, class Format>
struct HeldValues<P, Codes, Format, false> {
  unsigned words[2][4][1], factors[2];  ///< factors of two keys' block lane / 4

  __device__ __forceinline__ void load(const TwoRows<P, Format>& rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_words<Format>(rows.of[i], words[i]);
      const int own = static_cast<int>(threadIdx.x) % 4 * 2;
      unsigned two[1];
      load_bytes<2, Format::kScaleAlignment>(rows.scales[i] + Format::kScales + own, two);
      factors[i] = transposed_matrix(Codes::factors(two[0]));
#pragma unroll
      for (auto& group : words[i]) group[0] = transposed_matrix(group[0]);
    }
  }
};
/// The lane's 32 columns of two keys of a tile of codes of 8 bits: 16 of each 64. Zeros where there is no
/// key, as memory may hold NaN.
template <int kColumns>
struct HeldChunks {
  uint4 chunks[2][2];

  __device__ __forceinline__ void load(const char* tile, int first, int keys) {
    const int lane = static_cast<int>(threadIdx.x) % 32, own = first + lane / 4;
    const char* from = tile + own * kColumns + lane % 4 * 16;
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        chunks[chunk][i] = *reinterpret_cast<const uint4*>(from + chunk * 64 + i * 8 * kColumns);
        if (own + i * 8 >= keys) chunks[chunk][i] = {0, 0, 0, 0};
      }
  }
  /// Word `step` of key i of the lane's two.
  __device__ __forceinline__ unsigned word(int step, int i) const {
    const uint4& four = chunks[step / 4][i];
    return step % 4 == 0 ? four.x : step % 4 == 1 ? four.y : step % 4 == 2 ? four.z : four.w;
  }
};

/// A lane's values of K and of V of a tile's sixteen keys, from `first` on; `keys` of them exist.
template <class P, bool kDecodes = kDecodesKv<P>>
struct HeldK : HeldChunks<P::kHeadDim> {
  __device__ __forceinline__ void read(const ForwardStorage<P>& smem, int n, int first) {
    this->load(smem.shared + (smem.raw_k(n) - smem.base), first, P::kBc);
  }
};
template <class P, bool kDecodes = kDecodesKv<P>>
struct HeldV : HeldChunks<P::kHeadDimV> {
  __device__ __forceinline__ void read(const ForwardStorage<P>& smem, int n, int first, int keys) {
    this->load(smem.shared + (smem.raw_v(n) - smem.base), first, keys);
  }
};
template <class P, class Codes, class Format>
using HeldKeysOf =
    Conditional<(Format::kKeys > 0), HeldChannelKeys<P, Codes, Format>, HeldKeys<P, Codes, Format>>;
template <class P>
struct HeldK<P, true> : HeldKeysOf<P, typename FewRowsCodes<P>::K, OfHead<typename P::KFormat>> {
  __device__ __forceinline__ void read(const ForwardStorage<P>& smem, int n, int first) {
    this->load(TwoRows<P, OfHead<typename P::KFormat>>(RowSlot<P>(smem, smem.code_index_k(n)), first));
  }
};
template <class P>
struct HeldV<P, true> : HeldValues<P, typename FewRowsCodes<P>::V, OfHead<typename P::VFormat>> {
  __device__ __forceinline__ void read(const ForwardStorage<P>& smem, int n, int first, int) {
    this->load(TwoRows<P, OfHead<typename P::VFormat>>(RowSlot<P>(smem, smem.code_index_v(n)), first));
  }
};

// --- Q and S ----------------------------------------------------------------------------------------------

/// Q^T of eight rows as right operands of eight steps, in the order of columns that pairs of K have.
template <class P>
struct FewRowsOfQ {
  using Codes = typename FewRowsCodes<P>::K;
  using Element = typename Codes::Element;
  static constexpr bool kConverts = kIsFp16<Element> && !kIsFp16<typename P::Element>;
  unsigned b[8][2];
  float begin[4][2];  ///< of sums over a group, for the thread's two rows: less the codes' offset
  float undo[2] = {Codes::kUnit, Codes::kUnit};  ///< what makes scores of these rows' products

  __device__ __forceinline__ void read(const char* tile) {
    // Else addresses would be kept, and spilled, for all work tiles.
    const int lane = opaque(static_cast<int>(threadIdx.x) % 32);
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      unsigned pairs[4];
      Codes::Columns::read_q(tile, lane, group, pairs);
      b[2 * group][0] = pairs[0], b[2 * group][1] = pairs[1];
      b[2 * group + 1][0] = pairs[2], b[2 * group + 1][1] = pairs[3];
    }
    if (kConverts) convert();
    constexpr unsigned kOnes = CodeBits<Element>::kOne;
    const unsigned ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      float sums[4] = {};
      if (Codes::kOffset != 0.0f) {
        mma_16x8x16<Element>(sums, ones, b[2 * group][0], b[2 * group][1]);
        mma_16x8x16<Element>(sums, ones, b[2 * group + 1][0], b[2 * group + 1][1]);
      }
      begin[group][0] = -Codes::kOfOnes * sums[0], begin[group][1] = -Codes::kOfOnes * sums[1];
    }
  }

 private:
  /// To fp16, as convert_q() does: each row times a power of two.
  __device__ __forceinline__ void convert() {
    using From = typename P::Element;
    int largest = 0;
    for (const auto& step : b)
      for (const unsigned two : step)
        largest = max(largest, static_cast<int>(max(two << 16 & 0x7fff0000u, two & 0x7fff0000u)));
    largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, 1));
    largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, 2));
    const int exponent = max(largest >> 23, 15), of_row = static_cast<int>(threadIdx.x) % 4 * 8;
    const float factor = __int_as_float((268 - exponent) << 23),
                own = __int_as_float((exponent - 14) << 23) * Codes::kUnit;
    for (auto& step : b)
      for (unsigned& two : step) two = pack<fp16>(low_of<From>(two) * factor, high_of<From>(two) * factor);
    undo[0] = __shfl_sync(kWholeWarp, own, of_row), undo[1] = __shfl_sync(kWholeWarp, own, of_row + 4);
  }
};

/// Two steps over a group of 32 columns of two keys.
template <class Element, class Q>
__device__ __forceinline__ void multiply_group(float (&sums)[4], const unsigned (&pairs)[2][4], const Q& q,
                                               int group) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const unsigned a[4] = {pairs[0][2 * step], pairs[1][2 * step], pairs[0][2 * step + 1],
                           pairs[1][2 * step + 1]};
    mma_16x8x16<Element>(sums, a, q.b[2 * group + step][0], q.b[2 * group + step][1]);
  }
}

/// S^T = K Q^T: sums over groups, each times its scale.
template <class P, class Codes, class Format>
__device__ __forceinline__ void multiply_keys(const HeldKeys<P, Codes, Format, true>& k,
                                              const FewRowsOfQ<P>& q, float (&s)[4]) {
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    unsigned pairs[2][4];
    Codes::pairs(k.words[0][group], pairs[0]), Codes::pairs(k.words[1][group], pairs[1]);
    const float* begin = q.begin[group];
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = k.zeros.begin(group, i / 2, begin[i % 2]);
    multiply_group<typename Codes::Element>(sums, pairs, q, group);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = k.scales[i / 2].of_group(group);
      s[i] = group == 0 ? sums[i] * scale : fmaf(sums[i], scale, s[i]);
      s[i] = k.zeros.added(group, i / 2, begin[i % 2], s[i]);
    }
  }
}
/// The same of elements that are scaled.
template <class P, class Codes, class Format>
__device__ __forceinline__ void multiply_keys(const HeldKeys<P, Codes, Format, false>& k,
                                              const FewRowsOfQ<P>& q, float (&s)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = 0.0f;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    unsigned pairs[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned two = Codes::factors(group < 2 ? k.scales[i] & 0xffffu : k.scales[i] >> 16);
      Codes::pairs(k.words[i][group], select_bytes(two, 0u, group % 2 == 0 ? 0x1010 : 0x3232), pairs[i]);
    }
    multiply_group<typename Codes::Element>(s, pairs, q, group);
  }
}
/// The same of elements that are scaled by columns, with what is added to these.
template <class P, class Codes, class Format>
__device__ __forceinline__ void multiply_keys(const HeldChannelKeys<P, Codes, Format>& k,
                                              const FewRowsOfQ<P>& q, float (&s)[4]) {
  using Element = typename Codes::Element;
  const unsigned char* of_lane = k.scales + static_cast<int>(threadIdx.x) % 4 * 16;
  const auto load_pairs = [&](int place, unsigned(&to)[4]) {  // of columns that are four apart
    const uint4 eight = *reinterpret_cast<const uint4*>(of_lane + place);
    to[0] = select_bytes(eight.x, eight.z, 0x5410), to[1] = select_bytes(eight.x, eight.z, 0x7632);
    to[2] = select_bytes(eight.y, eight.w, 0x5410), to[3] = select_bytes(eight.y, eight.w, 0x7632);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = 0.0f;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    unsigned scales[4], added[4] = {kNoAddend, kNoAddend, kNoAddend, kNoAddend}, pairs[2][4];
    load_pairs(Format::kScales + group * 64, scales);
    if (Format::kZero != KvZero::none) load_pairs(Format::kZeros + group * 64, added);
#pragma unroll
    for (int key = 0; key < 2; ++key) {
      Codes::pairs(k.words[key][group], pairs[key]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned codes =
            fma_pair<Element>(pairs[key][i], CodeBits<Element>::kOne, Codes::kOffsetPair ^ 0x80008000u);
        pairs[key][i] = fma_pair<Element>(codes, scales[i], added[i]);
      }
    }
    multiply_group<Element>(s, pairs, q, group);
  }
}
template <class P, int kColumns>
__device__ __forceinline__ void multiply_keys(const HeldChunks<kColumns>& k, const FewRowsOfQ<P>& q,
                                              float (&s)[4]) {
  using Codes = WholeCodes<P>;
  float sums[2][4] = {};
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const unsigned low = k.word(step, 0), high = k.word(step, 1);
    const unsigned a[4] = {Codes::lower(low), Codes::lower(high), Codes::upper(low), Codes::upper(high)};
    mma_16x8x16<typename Codes::Element>(sums[step % 2], a, q.b[step][0], q.b[step][1]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = sums[0][i] + sums[1][i];
}

// --- O ----------------------------------------------------------------------------------------------------

/// O^T of two rows: of each of eight tiles of 16 columns two columns.
template <class P>
struct FewRowsOut {
  using Codes = typename FewRowsCodes<P>::V;
  using Element = typename Codes::Element;
  float tiles[8][4] = {};
  float offsets[4] = {};  ///< where codes have an offset: sums of P times scales, of group i in lanes 4 i on

  __device__ __forceinline__ void rescale(const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      offsets[i] *= by[i % 2];
#pragma unroll
      for (auto& tile : tiles) tile[i] *= by[i % 2];
    }
  }
  /// Adds a group of 32 columns of two keys, whose pairs are of these keys; `b` is P.
  __device__ __forceinline__ void add_group(int group, const unsigned (&pairs)[2][4],
                                            const unsigned (&b)[2]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const unsigned a[4] = {pairs[0][2 * tile], pairs[0][2 * tile + 1], pairs[1][2 * tile],
                             pairs[1][2 * tile + 1]};
      mma_16x8x16<Element>(tiles[2 * group + tile], a, b[0], b[1]);
    }
  }
  __device__ __forceinline__ void add_offset(int group, const unsigned (&b)[2]) {
    if (Codes::kOffset == 0.0f) return;
    const unsigned one = static_cast<int>(threadIdx.x) % 32 / 4 == group ? CodeBits<Element>::kOne : 0u;
    const unsigned ones[4] = {one, 0u, one, 0u};
    mma_16x8x16<Element>(offsets, ones, b[0], b[1]);
  }
  /// The same of pairs of these for the two halves of the keys.
  __device__ __forceinline__ void add_offset(int group, const unsigned (&b)[2], unsigned low, unsigned high) {
    const bool own = static_cast<int>(threadIdx.x) % 32 / 4 == group;
    const unsigned a[4] = {own ? low : 0u, 0u, own ? high : 0u, 0u};
    mma_16x8x16<Element>(offsets, a, b[0], b[1]);
  }
  /// Adds of(row of the thread's two, column), which are two columns'.
  template <class Of>
  __device__ __forceinline__ void add(const Of& of) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int tile = 0; tile < 8; ++tile)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float2 two = of(row, Codes::Columns::of_tile(lane, tile));
        tiles[tile][row] += two.x, tiles[tile][row + 2] += two.y;
      }
  }
  /// Calls use(row of the thread's two, column, O, O of the next column).
  template <class Use>
  __device__ __forceinline__ void for_each_pair(const Use& use) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int tile = 0; tile < 8; ++tile)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float less = Codes::kOffset == 0.0f ? 0.0f
                                                  : Codes::kOfOnes * __shfl_sync(kWholeWarp, offsets[row],
                                                                                 tile / 2 * 4 + lane % 4);
        use(row, Codes::Columns::of_tile(lane, tile), tiles[tile][row] - less, tiles[tile][row + 2] - less);
      }
  }
};

/// O^T += V^T P^T, with P times the scales of a group.
template <class P, class Codes, class Format>
__device__ __forceinline__ void add_values(const HeldValues<P, Codes, Format, true>& v, const float (&p)[4],
                                           FewRowsOut<P>& o) {
  using Element = typename Codes::Element;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const float low = v.scales[0].of_group(group), high = v.scales[1].of_group(group);
    const unsigned b[2] = {weights_of_keys<Element>(p[0] * low, p[1] * low),
                           weights_of_keys<Element>(p[2] * high, p[3] * high)};
    unsigned pairs[2][4];
    Codes::pairs(v.words[0][group], pairs[0]), Codes::pairs(v.words[1][group], pairs[1]);
    o.add_group(group, pairs, b);
    v.zeros.add(group, p, low, high, b, o);
  }
}
/// The same with elements that are scaled: the scales of a lane's columns are other lanes'.
template <class P, class Codes, class Format>
__device__ __forceinline__ void add_values(const HeldValues<P, Codes, Format, false>& v, const float (&p)[4],
                                           FewRowsOut<P>& o) {
  using Element = typename Codes::Element;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned b[2] = {weights_of_keys<Element>(p[0], p[1]), weights_of_keys<Element>(p[2], p[3])};
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    unsigned pairs[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      Codes::pairs(v.words[i][group],
                   __shfl_sync(kWholeWarp, v.factors[i], (2 * group + lane / 16) * 4 + lane % 4), pairs[i]);
    o.add_group(group, pairs, b);
  }
}
template <class P, int kColumns>
__device__ __forceinline__ void add_values(const HeldChunks<kColumns>& v, const float (&p)[4],
                                           FewRowsOut<P>& o) {
  using Codes = WholeCodes<P>;
  using Element = typename Codes::Element;
  const unsigned b[2] = {weights_of_keys<Element>(p[0], p[1]), weights_of_keys<Element>(p[2], p[3])};
#pragma unroll
  for (int tile = 0; tile < 8; ++tile) {
    // Two columns of two keys, by keys: then by columns.
    const auto by_columns = [&](int i) {
      return select_bytes(transposed_matrix(v.word(tile, i)), 0u, 0x3120);
    };
    const unsigned low = by_columns(0), high = by_columns(1);
    const unsigned a[4] = {Codes::lower(low), Codes::upper(low), Codes::lower(high), Codes::upper(high)};
    mma_16x8x16<Element>(o.tiles[tile], a, b[0], b[1]);
  }
}

}  // namespace flashjit::sm90
