// fmt's formatting functions, compiled once for the whole library: in header-only mode they are compiled again in every
// file that formats, which took four fifths of the build.
#include <fmt/format-inl.h>
