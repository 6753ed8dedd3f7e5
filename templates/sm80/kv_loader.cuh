// How a tile of K or V gets from global memory to shared memory; KvTileLoader<P> names one of the types
// below. All have load<kColumns>(held, tile, from, list, p, b, first, valid), which starts the copies of the
// keys from `first` on; keys from `valid` on, and keys that the source does not read, become zeros; `list()`
// is the query's list of keys. put<kColumns>(held, tile) ends them, where they wait in registers, `Held`.
#pragma once

#include "flashjit/common/decoded_kv.cuh"
#include "flashjit/common/index_list.cuh"
#include "flashjit/sm80/tile.cuh"

namespace flashjit::sm80 {

/// Copies that need no end.
struct NothingHeld {
  struct Held {};
  template <int kColumns>
  static __device__ __forceinline__ void put(Held&, unsigned) {}
};

/// One key after the other.
template <class P>
struct DenseKvLoader : NothingHeld {
  template <int kColumns, class List>
  static __device__ __forceinline__ void load(Held&, unsigned tile, const KvSource<P>& from, const List&,
                                              const Params&, int, int first, int valid) {
    const auto* row = reinterpret_cast<const unsigned short*>(from.row(first));
    load_tile<typename P::Copies, P::kBc, kColumns, P::kWarps * 32>(
        tile, row, kScaledKv<P> ? from.stride() / 2 : from.stride(), valid);
  }
};

/// The pages that a table names.
template <class P>
struct PagedKvLoader : NothingHeld {
  template <int kColumns, class List>
  static __device__ __forceinline__ void load(Held&, unsigned tile, const KvSource<P>& from, const List&,
                                              const Params&, int, int first, int valid) {
    constexpr int kThreads = P::kWarps * 32, kChunks = round_up(kColumns, 16) / 8;
#pragma unroll 1  // more rows at a time do not fit the registers
    for (int begin = 0; begin < P::kBc * kChunks; begin += kThreads) {
      const int index = begin + static_cast<int>(threadIdx.x), row = index / kChunks,
                column = index % kChunks * 8;
      if (P::kBc * kChunks % kThreads != 0 && row >= P::kBc) break;
      const bool in = from.reads(first + row) && row < valid && column < kColumns;
      P::Copies::start_16(tile + (row * pitch(kColumns) + column) * 2,
                          in ? from.row(first + row) + column : from.some_row(), in);
    }
  }
};

/// The same of 8 bits, two codes in a column. A lane looks up the pages of rows lane, lane + 32 and so on,
/// and those that copy these ask it.
template <class P>
struct PagedQuantizedKvLoader : NothingHeld {
  template <int kColumns, class List>
  static __device__ __forceinline__ void load(Held&, unsigned tile, const KvSource<P>& from, const List&,
                                              const Params&, int, int first, int valid) {
    constexpr int kThreads = P::kWarps * 32;
    constexpr int kChunks = round_up(kColumns, 16) / 8, kLookUps = (P::kBc + 31) / 32;
    int pages[kLookUps];
#pragma unroll
    for (int i = 0; i < kLookUps; ++i) {
      const int row = i * 32 + lane_index();
      pages[i] = from.reads(first + row) && row < min(valid, P::kBc) ? from.page_of(first + row) : 0;
    }
#pragma unroll 4
    for (int begin = 0; begin < P::kBc * kChunks; begin += kThreads) {
      const int index = begin + static_cast<int>(threadIdx.x), row = index / kChunks,
                column = index % kChunks * 8;
      int page = 0;
#pragma unroll
      for (int i = 0; i < kLookUps; ++i) {
        const int other = __shfl_sync(kWholeWarp, pages[i], row % 32);
        if (row / 32 == i) page = other;
      }
      if (P::kBc * kChunks % kThreads != 0 && row >= P::kBc) continue;
      const bool in = from.reads(first + row) && row < valid && column < kColumns;
      P::Copies::start_16(tile + (row * pitch(kColumns) + column) * 2,
                          in ? from.row_in_page(page, first + row) + column * 2 : from.some_row(), in);
    }
  }
};

/// Starts copying the keys that a list names from entry `first` on. A lane finds the slots of entries lane,
/// lane + 32 and so on, and those that copy these ask it.
template <class P, int kColumns, int kThreads>
__device__ __forceinline__ void load_listed_tile(unsigned tile, const KvSource<P>& from,
                                                 const IndexList<P>& list, const Params& p, int b,
                                                 int first) {
  constexpr int kChunks = round_up(kColumns, 16) / 8, kLookUps = (P::kBc + 31) / 32;
  int slots[kLookUps];
#pragma unroll
  for (int i = 0; i < kLookUps; ++i) {
    const int key = list.key(first + i * 32 + lane_index());
    slots[i] = key >= 0 ? slot_of_key<P>(p, b, key) : -1;
  }
#pragma unroll 4
  for (int begin = 0; begin < P::kBc * kChunks; begin += kThreads) {
    const int index = begin + static_cast<int>(threadIdx.x), row = index / kChunks,
              column = index % kChunks * 8;
    int slot = -1;
#pragma unroll
    for (int i = 0; i < kLookUps; ++i) {
      const int other = __shfl_sync(kWholeWarp, slots[i], row % 32);
      if (row / 32 == i) slot = other;
    }
    if (P::kBc * kChunks % kThreads != 0 && row >= P::kBc) continue;
    const bool in = slot >= 0 && column < kColumns;
    P::Copies::start_16(tile + (row * pitch(kColumns) + column) * 2,
                        in ? from.row_in_slot(slot) + column : from.some_row(), in);
  }
}

/// The keys that a query's list names.
template <class P>
struct ListedKvLoader : NothingHeld {
  template <int kColumns, class List>
  static __device__ __forceinline__ void load(Held&, unsigned tile, const KvSource<P>& from, const List& list,
                                              const Params& p, int b, int first, int) {
    load_listed_tile<P, kColumns, P::kWarps * 32>(tile, from, list(), p, b, first);
  }
};

/// Rows of any format, in any place: decoded as they are read, 16 columns at a time. A barrier follows, as it
/// does after copies.
template <class P>
struct DecodedKvLoader : NothingHeld {
  template <int kColumns, class Source, class List>
  static __device__ __forceinline__ void load(Held&, unsigned tile, const Source& from, const List& list,
                                              const Params&, int, int first, int valid) {
    constexpr int kThreads = P::kWarps * 32, kPieces = kColumns / 16, kAtOnce = Source::kPiecesAtOnce;
    extern __shared__ __align__(128) char shared[];
    char* at = shared + (tile - shared_address(shared));
#pragma unroll kAtOnce
    for (int begin = 0; begin < P::kBc * kPieces; begin += kThreads) {
      const int index = begin + static_cast<int>(threadIdx.x), row = index / kPieces,
                column = index % kPieces * 16;
      if (P::kBc * kPieces % kThreads != 0 && row >= P::kBc) break;
      const int key = P::kIndices ? list().key(first + row) : row < valid ? first + row : -1;
      uint4 x[2] = {};
      if (key >= 0 && from.reads(key)) from.template decode16<typename P::Element>(key, column, x);
      auto* to = reinterpret_cast<uint4*>(at + (row * pitch(kColumns) + column) * 2);
      to[0] = x[0];
      to[1] = x[1];
    }
  }
};

template <class P>
using CopyingKvLoader =
    Conditional<P::kIndices, ListedKvLoader<P>,
                Conditional<P::kPageRows == 0, typename P::Copies::template DenseKvLoader<P>,
                            Conditional<kScaledKv<P>, PagedQuantizedKvLoader<P>, PagedKvLoader<P>>>>;
template <class P>
struct TmaKvLoader;  // kv_loader_tma.cuh
template <class P>
struct TmaKvSources;
template <class P>
using KvTileLoader =
    Conditional<P::kTma, TmaKvLoader<P>, Conditional<kDecodesKv<P>, DecodedKvLoader<P>, CopyingKvLoader<P>>>;
/// What it loads from.
template <class P>
using TileSources = Conditional<P::kTma, TmaKvSources<P>, KvSources<P>>;

/// Starts copying a tile's scales of keys, where they have some: zeros from `valid` on, and where they are
/// not read.
template <class P>
__device__ __forceinline__ void load_key_scales(float* to, const KvScales<P>& from, int first, int valid) {
  constexpr int kThreads = P::kWarps * 32;
  if constexpr (P::kKeyScales) {
#pragma unroll
    for (int begin = 0; begin < P::kBc; begin += kThreads) {
      const int row = begin + static_cast<int>(threadIdx.x);
      if (P::kBc % kThreads != 0 && row >= P::kBc) break;
      const bool in = from.reads(first + row) && row < valid;
      P::Copies::start_4(shared_address(to + row), in ? from.of_key(first + row) : from.some(), in);
    }
  }
}

}  // namespace flashjit::sm80
