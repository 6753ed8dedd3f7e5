// NumPy's .npy files: versions 1 and 2, little-endian, C order. What cannot be read is refused, never
// guessed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace flashjit::npy {

/// The element types read and written. bf16 has no .npy type: store it as float32, which holds every bf16.
enum class Type : std::uint8_t { float16, float32, float64, uint8, int32 };

std::string to_string(Type type);  // "float16", ...
/// Bytes of one element.
std::size_t size_of(Type type);

/// An array in C order: the last dimension varies fastest.
struct Array {
  Type type = Type::float32;
  std::vector<std::int64_t> shape;  ///< empty: a scalar, one element
  std::vector<std::byte> bytes;     ///< elements() * size_of(type), little-endian

  std::int64_t elements() const;
  bool operator==(const Array&) const = default;
};

/// Throws Error(io) that names the file and what is wrong: not there, not a .npy file, truncated or too long,
/// header damaged, Fortran order, big-endian, an element type that is not listed above, sizes that overflow.
Array read(const std::filesystem::path& path);
/// Replaces the file atomically. Throws Error(io) when it cannot be written, Error(invalid_argument) when
/// bytes and shape disagree.
void write(const std::filesystem::path& path, const Array& array);

/// The file's content, as bytes in memory; messages call it `name`.
Array parse(const std::string& content, const std::string& name);
std::string serialize(const Array& array);

/// Every element as fp64; exact.
std::vector<double> to_doubles(const Array& array);
/// Values rounded to `type` (nearest even; integers: clamped to their range). Throws Error(invalid_argument)
/// when the count disagrees with the shape, or on NaN for an integer type.
Array from_doubles(Type type, std::vector<std::int64_t> shape, const std::vector<double>& values);

}  // namespace flashjit::npy
