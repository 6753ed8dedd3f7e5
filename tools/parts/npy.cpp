#include "tools/parts/npy.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "flashjit/error.hpp"
#include "support/file.hpp"
#include "support/overflow.hpp"
#include "support/small_float.hpp"
#include "support/text.hpp"

namespace flashjit::npy {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are copied as they lie in the file");

constexpr std::string_view kMagic{"\x93NUMPY", 6};
constexpr std::size_t kMaxHeader = 1 << 16;
constexpr std::size_t kMaxDimensions = 32;  // NumPy's own limit
constexpr std::size_t kAlignment = 64;      // of the data in the file, as NumPy writes it

struct TypeInfo {
  Type type;
  std::string_view name, descr;
  std::size_t size;
};
constexpr std::array kTypes = {
    TypeInfo{Type::float16, "float16", "<f2", 2}, TypeInfo{Type::float32, "float32", "<f4", 4},
    TypeInfo{Type::float64, "float64", "<f8", 8}, TypeInfo{Type::uint8, "uint8", "|u1", 1},
    TypeInfo{Type::int32, "int32", "<i4", 4},
};

const TypeInfo& info(Type type) { return kTypes[static_cast<std::size_t>(type)]; }

/// Number of elements of a shape whose bytes can be counted in 63 bits.
std::optional<std::int64_t> element_count(const std::vector<std::int64_t>& shape, std::size_t element_size) {
  auto bytes = static_cast<std::int64_t>(element_size);
  for (const std::int64_t size : shape) {
    if (size < 0 || multiply_overflows(bytes, size, bytes)) return std::nullopt;
  }
  return bytes / static_cast<std::int64_t>(element_size);
}

std::int64_t checked_elements(Type type, const std::vector<std::int64_t>& shape) {
  const std::optional<std::int64_t> elements = element_count(shape, size_of(type));
  if (!elements) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format(
            "an array of shape [{}] cannot be stored; sizes must not be negative, and all bytes together "
            "at most 2^63 - 1",
            fmt::join(shape, ", ")));
  }
  return *elements;
}

/// Reads one file's bytes from front to back; every refusal names the file.
class Reader {
 public:
  Reader(std::string_view rest, const std::string& name) : rest_(rest), name_(name) {}

  [[noreturn]] void refuse(std::string_view why) const {
    throw Error(ErrorCode::io, fmt::format("'{}' is no .npy file that can be read: {}", name_, why));
  }
  std::string_view rest() const { return rest_; }

  std::string_view take(std::size_t count, std::string_view what) {
    if (rest_.size() < count) {
      refuse(
          fmt::format("it ends after {} of {} bytes of its {}; write it again", rest_.size(), count, what));
    }
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  std::size_t take_length(std::size_t bytes) {
    std::uint32_t length = 0;
    std::memcpy(&length, take(bytes, "header length").data(), bytes);
    return length;
  }

  void skip_space() { rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\n\r"), rest_.size())); }
  /// Whether `text` comes next; passes over it.
  bool accept(std::string_view text) {
    skip_space();
    if (!rest_.starts_with(text)) return false;
    rest_.remove_prefix(text.size());
    return true;
  }
  void expect(std::string_view text) {
    if (!accept(text)) refuse(fmt::format("its header has {} where '{}' is expected", quoted(rest_), text));
  }

  std::string_view string() {
    const std::string_view quote = accept("\"") ? "\"" : "'";
    if (quote == "'") expect("'");
    const std::size_t end = rest_.find(quote);
    if (end == std::string_view::npos) refuse("a name in its header has no closing quote");
    const std::string_view text = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    return text;
  }
  std::int64_t integer() {
    skip_space();
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error == std::errc::result_out_of_range || value < 0)
      refuse("a size in its shape is negative or above 2^63 - 1");
    if (error != std::errc{}) refuse(fmt::format("its shape has {} where a size is expected", quoted(rest_)));
    rest_.remove_prefix(end - rest_.data());
    return value;
  }

 private:
  std::string_view rest_;
  const std::string& name_;
};

Type read_type(Reader& header) {
  header.skip_space();
  if (header.rest().starts_with('['))
    header.refuse("its elements are structures; store one number an element");
  const std::string_view descr = header.string();
  for (const TypeInfo& known : kTypes) {
    if (descr == known.descr || (known.size == 1 && descr == "<u1")) return known.type;
  }
  if (descr.starts_with('>')) {
    header.refuse(
        fmt::format("its element type {} is big-endian; convert it with array.astype('<f4')", quoted(descr)));
  }
  header.refuse(
      fmt::format("its element type is {}; allowed are float16, float32, float64, uint8 and int32 "
                  "(store bfloat16 as float32)",
                  quoted(descr)));
}

std::vector<std::int64_t> read_shape(Reader& header) {
  std::vector<std::int64_t> shape;
  header.expect("(");
  while (!header.accept(")")) {
    if (shape.size() == kMaxDimensions)
      header.refuse(fmt::format("it has more than {} dimensions", kMaxDimensions));
    shape.push_back(header.integer());
    if (!header.accept(",")) {
      header.expect(")");
      break;
    }
  }
  return shape;
}

void require_c_order(Reader& header) {
  if (header.accept("False")) return;
  header.expect("True");
  header.refuse("it is in Fortran order; write numpy.ascontiguousarray(array) instead");
}

/// The header's dictionary, which holds exactly descr, fortran_order and shape.
std::pair<Type, std::vector<std::int64_t>> read_header(Reader header) {
  std::optional<Type> type;
  std::optional<std::vector<std::int64_t>> shape;
  bool has_order = false;
  header.expect("{");
  while (!header.accept("}")) {
    const std::string_view key = header.string();
    header.expect(":");
    if (key == "descr" && !type) {
      type = read_type(header);
    } else if (key == "shape" && !shape) {
      shape = read_shape(header);
    } else if (key == "fortran_order" && !has_order) {
      require_c_order(header);
      has_order = true;
    } else {
      header.refuse(fmt::format("its header holds {}, unknown or for the second time", quoted(key)));
    }
    if (!header.accept(",")) {
      header.expect("}");
      break;
    }
  }
  header.skip_space();
  if (!header.rest().empty())
    header.refuse(fmt::format("its header goes on after the end with {}", quoted(header.rest())));
  if (!type || !shape || !has_order) header.refuse("its header lacks one of descr, fortran_order and shape");
  return {*type, std::move(*shape)};
}

template <class Number>
Number number_at(const Array& array, std::size_t index) {
  Number number;
  std::memcpy(&number, array.bytes.data() + index * sizeof number, sizeof number);
  return number;
}

template <class Number>
void put_number(Array& array, std::size_t index, Number number) {
  std::memcpy(array.bytes.data() + index * sizeof number, &number, sizeof number);
}

template <class Integer>
Integer to_integer(double value) {
  if (std::isnan(value)) {
    throw Error(ErrorCode::invalid_argument,
                "NaN cannot be stored as an integer; choose a floating-point type");
  }
  return static_cast<Integer>(std::clamp<double>(std::nearbyint(value), std::numeric_limits<Integer>::min(),
                                                 std::numeric_limits<Integer>::max()));
}

}  // namespace

std::string to_string(Type type) { return std::string(info(type).name); }
std::size_t size_of(Type type) { return info(type).size; }

std::int64_t Array::elements() const { return checked_elements(type, shape); }

Array parse(const std::string& content, const std::string& name) {
  Reader file(content, name);
  if (!file.rest().starts_with(kMagic)) file.refuse("it does not begin with the bytes \\x93NUMPY");
  file.take(kMagic.size(), "start");
  const std::string_view version = file.take(2, "version");
  const int major = static_cast<unsigned char>(version[0]);
  if (major != 1 && major != 2)
    file.refuse(fmt::format("its format version is {}; versions 1 and 2 are read", major));
  const std::size_t header_length = file.take_length(major == 1 ? 2 : 4);
  if (header_length > kMaxHeader) {
    file.refuse(fmt::format("its header has {} bytes; at most {} are allowed", header_length, kMaxHeader));
  }
  auto [type, shape] = read_header(Reader(file.take(header_length, "header"), name));

  const std::optional<std::int64_t> elements = element_count(shape, size_of(type));
  if (!elements)
    file.refuse(fmt::format("its shape ({}) has more than 2^63 - 1 bytes", fmt::join(shape, ", ")));
  const std::size_t bytes = static_cast<std::size_t>(*elements) * size_of(type);
  const std::string_view data = file.take(bytes, "data");
  if (!file.rest().empty()) {
    file.refuse(fmt::format("it goes on for {} bytes after its {} bytes of data; write it again",
                            file.rest().size(), bytes));
  }
  Array array{type, std::move(shape), std::vector<std::byte>(bytes)};
  std::copy_n(reinterpret_cast<const std::byte*>(data.data()), bytes, array.bytes.begin());
  return array;
}

std::string serialize(const Array& array) {
  const std::size_t bytes = static_cast<std::size_t>(array.elements()) * size_of(array.type);
  if (array.bytes.size() != bytes || array.shape.size() > kMaxDimensions) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format(
            "an array of type {} and shape [{}] was given {} bytes; {} and at most {} dimensions are needed",
            to_string(array.type), fmt::join(array.shape, ", "), array.bytes.size(), bytes, kMaxDimensions));
  }
  // Python writes a tuple of one with a comma behind it, and reads a longer one with it as well.
  std::string header =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", info(array.type).descr,
                  fmt::join(array.shape, ", "), array.shape.size() == 1 ? "," : "");
  const std::size_t prefix = kMagic.size() + 4;
  const std::size_t padded = (prefix + header.size() + 1 + kAlignment - 1) / kAlignment * kAlignment;
  header.append(padded - prefix - header.size() - 1, ' ').push_back('\n');

  const auto length =
      static_cast<std::uint16_t>(header.size());  // 32 dimensions of 19 digits are far below 2^16
  std::string content(kMagic);
  content += {'\x01', '\x00', static_cast<char>(length & 0xff), static_cast<char>(length >> 8)};
  content += header;
  content.append(reinterpret_cast<const char*>(array.bytes.data()), array.bytes.size());
  return content;
}

Array read(const std::filesystem::path& path) { return parse(read_file(path), path.string()); }

void write(const std::filesystem::path& path, const Array& array) {
  write_file_atomically(path, serialize(array));
}

std::vector<double> to_doubles(const Array& array) {
  std::vector<double> values(array.bytes.size() / size_of(array.type));
  for (std::size_t i = 0; i < values.size(); ++i) {
    switch (array.type) {
      case Type::float16:
        values[i] = Fp16::decode(number_at<std::uint16_t>(array, i));
        break;
      case Type::float32:
        values[i] = number_at<float>(array, i);
        break;
      case Type::float64:
        values[i] = number_at<double>(array, i);
        break;
      case Type::uint8:
        values[i] = number_at<std::uint8_t>(array, i);
        break;
      case Type::int32:
        values[i] = number_at<std::int32_t>(array, i);
        break;
    }
  }
  return values;
}

Array from_doubles(Type type, std::vector<std::int64_t> shape, const std::vector<double>& values) {
  if (checked_elements(type, shape) != static_cast<std::int64_t>(values.size())) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} values were given for an array of shape [{}]; give one for each element",
                            values.size(), fmt::join(shape, ", ")));
  }
  Array array{type, std::move(shape), std::vector<std::byte>(values.size() * size_of(type))};
  for (std::size_t i = 0; i < values.size(); ++i) {
    switch (type) {
      case Type::float16:
        put_number(array, i, Fp16::encode(values[i]));
        break;
      case Type::float32:
        put_number(array, i, static_cast<float>(values[i]));
        break;
      case Type::float64:
        put_number(array, i, values[i]);
        break;
      case Type::uint8:
        put_number(array, i, to_integer<std::uint8_t>(values[i]));
        break;
      case Type::int32:
        put_number(array, i, to_integer<std::int32_t>(values[i]));
        break;
    }
  }
  return array;
}

}  // namespace flashjit::npy
