# Writes a C++ file with a function of namespace NAMESPACE that gives every file of ROOT in FILES, as a string literal,
# by its name behind PREFIX.
include(${CMAKE_CURRENT_LIST_DIR}/cmake/byte_literal.cmake)

set(text "// Made by tools/embed_files.cmake.\n#include <map>\n#include <string>\n\n")
string(APPEND text "namespace ${NAMESPACE} {\n\n")
string(APPEND text "std::map<std::string, std::string> ${FUNCTION}();\n\n")
string(APPEND text "std::map<std::string, std::string> ${FUNCTION}() {\n  return {\n")
foreach(file IN LISTS FILES)
  byte_literal(${ROOT}/${file} "       " bytes size)
  string(APPEND text "      {\"${PREFIX}${file}\",\n       ${bytes}},\n")
endforeach()
string(APPEND text "  };\n}\n\n}  // namespace ${NAMESPACE}\n")
file(WRITE ${OUTPUT} "${text}")
