# flashjit.dll: what the headers export and nothing else. MinGW's import library is libflashjit.dll.a; from flashjit.def
# other linkers' tools make theirs (`lib /def:flashjit.def /machine:x64`).
set_target_properties(flashjit PROPERTIES PREFIX "")
if(MINGW)
  target_link_options(flashjit PRIVATE -Wl,--output-def,${CMAKE_CURRENT_BINARY_DIR}/flashjit.def)
endif()
