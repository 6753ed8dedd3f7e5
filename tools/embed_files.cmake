# Writes a C++ file with a function of namespace NAMESPACE that gives every file of ROOT in FILES, as a string literal,
# by its name behind PREFIX. As hexadecimal escapes: what a file contains (quotes, raw-string ends, CR, UTF-8) then cannot matter.
set(text "// Made by tools/embed_files.cmake.\n#include <map>\n#include <string>\n\n")
string(APPEND text "namespace ${NAMESPACE} {\n\n")
string(APPEND text "std::map<std::string, std::string> ${FUNCTION}();\n\n")
string(APPEND text "std::map<std::string, std::string> ${FUNCTION}() {\n  return {\n")
string(REPEAT "." 64 line)
foreach(file IN LISTS FILES)
  file(READ ${ROOT}/${file} bytes HEX)
  # Compilers bound the length of one literal: adjacent ones of 32 bytes make the whole.
  string(REGEX REPLACE "(${line})" "\\1\n" bytes "${bytes}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "\\\\x\\1" bytes "${bytes}")
  string(REPLACE "\n" "\"\n       \"" bytes "${bytes}")
  string(APPEND text "      {\"${PREFIX}${file}\",\n       \"${bytes}\"},\n")
endforeach()
string(APPEND text "  };\n}\n\n}  // namespace ${NAMESPACE}\n")
file(WRITE ${OUTPUT} "${text}")
