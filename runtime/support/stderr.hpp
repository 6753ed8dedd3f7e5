// What is written for people to read. A process may have no stderr, or one that takes nothing more: that is
// no reason for its work to fail.
#pragma once

#include <string_view>

namespace flashjit {

/// Whether the process has a stderr. Without one its descriptor is free: a file may get the number later, and
/// must not get the lines.
bool stderr_is_open() noexcept;

/// Writes to stderr, in one piece where the kernel takes it so. Never throws or raises a signal: what cannot
/// be written, to a full disk or to a pipe that is full or has no reader, is dropped.
void write_to_stderr(std::string_view text) noexcept;

}  // namespace flashjit
