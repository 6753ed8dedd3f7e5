# Writes a C++ file that holds every template as a string literal.
# As hexadecimal escapes: what a template contains (quotes, raw-string ends, CR, UTF-8) then cannot matter.
set(text "// Made from templates/ by tools/embed_templates.cmake.\n#include <map>\n#include <string>\n\n")
string(APPEND text "namespace flashjit::render {\n\n")
string(APPEND text "std::map<std::string, std::string> embedded_template_texts();\n\n")
string(APPEND text "std::map<std::string, std::string> embedded_template_texts() {\n  return {\n")
string(REPEAT "." 64 line)
foreach(file IN LISTS FILES)
  file(READ ${ROOT}/${file} bytes HEX)
  # Compilers bound the length of one literal: adjacent ones of 32 bytes make the whole.
  string(REGEX REPLACE "(${line})" "\\1\n" bytes "${bytes}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "\\\\x\\1" bytes "${bytes}")
  string(REPLACE "\n" "\"\n       \"" bytes "${bytes}")
  string(APPEND text "      {\"flashjit/${file}\",\n       \"${bytes}\"},\n")
endforeach()
string(APPEND text "  };\n}\n\n}  // namespace flashjit::render\n")
file(WRITE ${OUTPUT} "${text}")
