# flashjit_add_pack(<target> SPECS <spec>... MODELS <model>... ARCHS <arch>... [SHAPES <shape>...] [SUITE <file>] [EMBED])
#
# Compiles attention kernels when <target> is built and ships them with it, so that the program needs no NVRTC. Needs
# NVRTC on the building machine, and no GPU.
#
#   SPECS   such as bf16:d128:causal, both passes without fwd: or bwd:, or bf16:d128:causal:pages16, which has a forward
#           pass alone; append:bf16:d128:pages16 stores into its cache
#   MODELS  such as "32/8 heads, d128, pages of 16, bf16": all that serves one, as flashjit pack --model
#   ARCHS   such as sm_80 sm_90a
#   SHAPES  to choose tile configurations for, such as b2:hq16:hkv16:sq4096:skv4096
#   SUITE   a file of "spec [shape]" lines
#
# SPECS, MODELS and SUITE go together, and one of them is enough.
#
# Without EMBED the pack is the folder <target>-pack beside the program, whose name the macro FLASHJIT_PACK holds:
#   flashjit::Runtime runtime({.packs = {folder_of_the_program + "/" FLASHJIT_PACK}});
# With EMBED it is in the program, as the variable that <target>_pack.hpp declares:
#   flashjit::Runtime runtime({.embedded_packs = {<target>_pack}});
include_guard(GLOBAL)

set(FLASHJIT_EMBED_PACK_SCRIPT ${CMAKE_CURRENT_LIST_DIR}/embed_pack.cmake)

function(flashjit_add_pack target)
  cmake_parse_arguments(PARSE_ARGV 1 pack "EMBED" "SUITE" "SPECS;MODELS;ARCHS;SHAPES")
  if(NOT TARGET ${target})
    message(FATAL_ERROR "flashjit_add_pack: there is no target '${target}'; add it before")
  endif()
  if(pack_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "flashjit_add_pack(${target}): unknown: ${pack_UNPARSED_ARGUMENTS}; give SPECS, MODELS, ARCHS, "
                        "SHAPES, SUITE or EMBED")
  endif()
  if(NOT pack_ARCHS OR NOT (pack_SPECS OR pack_MODELS OR pack_SUITE))
    message(FATAL_ERROR "flashjit_add_pack(${target}) needs ARCHS, such as sm_90a, and SPECS, such as bf16:d128:causal, "
                        "MODELS or a SUITE")
  endif()

  list(JOIN pack_ARCHS "," archs)
  set(arguments --arch ${archs})
  # An unquoted list ends its elements at ';', also within a program's braces.
  set(spec "")
  foreach(part IN LISTS pack_SPECS)
    string(APPEND spec "${part}")
    string(REGEX REPLACE "[^{]" "" opened "${spec}")
    string(REGEX REPLACE "[^}]" "" closed "${spec}")
    string(LENGTH "${opened}" opened)
    string(LENGTH "${closed}" closed)
    if(opened GREATER closed)
      string(APPEND spec ";")
    else()
      string(REPLACE ";" "\\;" spec "${spec}")
      list(APPEND arguments --spec "${spec}")
      set(spec "")
    endif()
  endforeach()
  if(spec)
    message(FATAL_ERROR "flashjit_add_pack(${target}): '${spec}' has a '{' without its '}'")
  endif()
  foreach(model IN LISTS pack_MODELS)
    list(APPEND arguments --model ${model})
  endforeach()
  foreach(shape IN LISTS pack_SHAPES)
    list(APPEND arguments --shape ${shape})
  endforeach()
  if(pack_SUITE)
    cmake_path(ABSOLUTE_PATH pack_SUITE NORMALIZE)
    list(APPEND arguments --suite ${pack_SUITE})
  endif()

  set(folder ${CMAKE_CURRENT_BINARY_DIR}/${target}-pack)
  set(stamp ${folder}.stamp)
  # From nothing, so that the pack holds what is asked for and no more.
  add_custom_command(
    OUTPUT ${stamp}
    COMMAND ${CMAKE_COMMAND} -E rm -rf ${folder}
    COMMAND flashjit::command pack ${arguments} --out ${folder}
    COMMAND ${CMAKE_COMMAND} -E touch ${stamp}
    DEPENDS flashjit::command ${pack_SUITE}
    COMMENT "Compiling the attention kernels of ${target}"
    VERBATIM)

  if(pack_EMBED)
    set(source ${CMAKE_CURRENT_BINARY_DIR}/${target}_pack/${target}_pack.cpp)
    set(header ${CMAKE_CURRENT_BINARY_DIR}/${target}_pack/${target}_pack.hpp)
    string(MAKE_C_IDENTIFIER ${target}_pack name)
    add_custom_command(
      OUTPUT ${source} ${header}
      COMMAND ${CMAKE_COMMAND} -DPACK=${folder} -DNAME=${name} -DSOURCE=${source} -DHEADER=${header} -P
              ${FLASHJIT_EMBED_PACK_SCRIPT}
      DEPENDS ${stamp} ${FLASHJIT_EMBED_PACK_SCRIPT}
      COMMENT "Embedding the attention kernels of ${target}"
      VERBATIM)
    target_sources(${target} PRIVATE ${source} ${header})
    target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/${target}_pack)
    return()
  endif()

  add_custom_target(${target}_pack DEPENDS ${stamp})
  add_dependencies(${target} ${target}_pack)
  target_compile_definitions(${target} PRIVATE FLASHJIT_PACK="${target}-pack")
  set_target_properties(${target} PROPERTIES FLASHJIT_PACK_FOLDER ${folder})
  # Where the program is put elsewhere than into this folder, the pack follows it.
  add_custom_command(
    TARGET ${target} POST_BUILD
    COMMAND ${CMAKE_COMMAND} -DFROM=${folder} "-DTO=$<TARGET_FILE_DIR:${target}>/${target}-pack" -P
            ${FLASHJIT_EMBED_PACK_SCRIPT}
    VERBATIM)
endfunction()
