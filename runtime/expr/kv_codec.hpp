// Rows of K or V between elements and a KvFormat's bytes, on the host: what the kernels are checked against.
#pragma once

#include <cstdint>
#include <span>

#include "support/kv_names.hpp"

namespace flashjit {

/// The value of a code; `code` has format.bits() bits.
double code_value(const KvFormat& format, unsigned code);
/// The nearest code, ties to even; larger values become the largest code.
unsigned code_of(const KvFormat& format, float value);

/// The largest magnitude of a code, with the sign that scales give it: scales of a call are positive, and a
/// row's may be negative, so that -8 of int4 is used.
float largest_value(const KvFormat& format);

/// The largest magnitude of a row where its scale at the call is 1; with scales of e4m3 in the row, too.
float largest_with_argument(const KvFormat& format);

double decode_number(KvFormat::Number type, const std::uint8_t* from);
/// The nearest of its type, of e8m0 the next larger; returns what it decodes to.
float encode_number(KvFormat::Number type, float value, std::uint8_t* to);
/// The same of scales: for positive values never zero, and never infinite.
float encode_scale(KvFormat::Number type, float value, std::uint8_t* to);

/// Fills `dim` elements. `argument`: the call's scale for this row; 1 where the format has none. `scales`:
/// the row of the scales' tensor, where the format has one.
void decode_row(const KvFormat& format, int dim, const std::uint8_t* row, double argument, double* to,
                const std::uint8_t* scales = nullptr);
/// Fills a row's bytes, and the scales' row. The call's scale is read. Not for formats whose keys share
/// scales.
void encode_row(const KvFormat& format, int dim, const double* from, float argument, std::uint8_t* row,
                std::uint8_t* scales = nullptr);
/// Fills the rows of format.keys keys that share scales, and these; `from` has the keys' elements, and `rows`
/// says where each key's bytes are.
void encode_keys(const KvFormat& format, int dim, const double* from, std::span<std::uint8_t* const> rows,
                 std::uint8_t* scales);

}  // namespace flashjit
