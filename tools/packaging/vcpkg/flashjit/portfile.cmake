# An overlay port of the tree that it is in:
#   vcpkg install flashjit --overlay-ports=tools/packaging/vcpkg
# CUDA's headers (cuda.h, nvrtc.h) are the system's: of CUDA_HOME, or /usr/local/cuda.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../../.." ABSOLUTE)

vcpkg_check_features(OUT_FEATURE_OPTIONS feature_options FEATURES command FLASHJIT_TOOLS)
vcpkg_cmake_configure(
    SOURCE_PATH "${SOURCE_PATH}"
    OPTIONS
        -DFLASHJIT_TESTS=OFF
        ${feature_options}
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/flashjit)
vcpkg_fixup_pkgconfig()
if("command" IN_LIST FEATURES)
    vcpkg_copy_tools(TOOL_NAMES flashjit AUTO_CLEAN)
endif()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share"
                    "${CURRENT_PACKAGES_DIR}/share/doc")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
