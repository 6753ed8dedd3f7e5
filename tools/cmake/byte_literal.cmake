# byte_literal(<file> <indent> <result> <size>): the file's bytes as adjacent C++ string literals, and how many they are. As
# hexadecimal escapes: what a file contains (quotes, raw-string ends, CR, UTF-8) then cannot matter. Compilers bound the
# length of one literal: each has 32 bytes.
function(byte_literal file indent result size)
  file(READ ${file} bytes HEX)
  string(LENGTH "${bytes}" digits)
  math(EXPR count "${digits} / 2")
  string(REPEAT "." 64 line)
  string(REGEX REPLACE "(${line})" "\\1\n" bytes "${bytes}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "\\\\x\\1" bytes "${bytes}")
  string(REPLACE "\n" "\"\n${indent}\"" bytes "${bytes}")
  set(${result} "\"${bytes}\"" PARENT_SCOPE)
  set(${size} ${count} PARENT_SCOPE)
endfunction()
