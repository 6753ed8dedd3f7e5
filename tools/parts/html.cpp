#include "tools/parts/html.hpp"

namespace flashjit::html {
namespace {

constexpr std::string_view kStyle = R"css(
body { font: 14px/1.4 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222 }
h2 { font-size: 16px; border-top: 1px solid #ccc; padding-top: 1em } code { font-size: 14px }
figure { margin: 1em 0; overflow-x: auto } figcaption { margin-bottom: 4px } .about { color: #666 }
svg text { font: 11px system-ui, sans-serif; fill: #222 } .c { text-anchor: middle } .r { text-anchor: end }
svg .p { fill: #999; font-style: italic } .best { stroke: #000; stroke-width: 3 } .frame { fill: none; stroke: #ccc }
.roof { stroke: #36c; stroke-dasharray: 4 3 } .sm90 { fill: #2a7 } .sm80 { fill: #d80 } .sm75 { fill: #b5b } .simt { fill: #888 }
table { border-collapse: collapse; margin: 6px 0 } td, th { padding: 1px 10px 1px 0; text-align: left }
summary { cursor: pointer }
pre { overflow-x: auto; font-size: 12px } .computed { fill: #2a7 } .masked { fill: #fb5 } .empty { fill: #c55 } .skipped { fill: #eee }
)css";

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string head(std::string_view title) {
  std::string page;
  put(page,
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{}</title><style>{}</style>"
      "</head><body>\n",
      escaped(title), kStyle);
  return page;
}

}  // namespace flashjit::html
