// fmt's formatting functions, compiled once: CMakeLists.txt says why. Nothing to do where fmt is header-only.
#ifndef FMT_HEADER_ONLY
#include <fmt/format-inl.h>

// What fmt's headers promise to be instantiated elsewhere.
template fmt::detail::thousands_sep_result<char> fmt::detail::thousands_sep_impl(fmt::detail::locale_ref);
template char fmt::detail::decimal_point_impl(fmt::detail::locale_ref);
#endif
