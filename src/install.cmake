# cmake --install BUILD --prefix DIR makes a tree that runs from any place:
#   bin/weftd, bin/weftctl
#   lib/weft/weftd.so, and all libraries except those of the system and LibTorch
# weftd looks for LibTorch in lib/weft/torch, which is a copy of the torch
# package's folder or a link to it. weftd --torch-dir names another folder.
if(NOT TARGET weftd)
  return()
endif()

# These flags write DT_RPATH, which also finds the libraries that a library
# needs. RUNPATH does not.
target_link_options(weftd PRIVATE -Wl,--disable-new-dtags)
target_link_options(weftctl PRIVATE -Wl,--disable-new-dtags)
target_link_options(weftd_service PRIVATE -Wl,--disable-new-dtags)
set_target_properties(weftd weftctl PROPERTIES
  INSTALL_RPATH "$ORIGIN/../lib/weft")
set_target_properties(weftd_service PROPERTIES
  INSTALL_RPATH "$ORIGIN:$ORIGIN/torch/lib")

install(TARGETS weftd weftctl RUNTIME DESTINATION bin)
install(TARGETS weftd_service LIBRARY DESTINATION lib/weft)
install(FILES LICENSE README.md DESTINATION share/doc/weft)
# Every system has the C and C++ runtimes, so they are not installed.
install(CODE "set(_system \"^(ld-linux.*|lib(c|m|dl|rt|util|pthread|resolv|stdc\\\\+\\\\+|gcc_s)\\\\.so.*)$\")")
install(CODE "set(_torch \"^lib(torch|c10|gomp).*\")")
install(CODE "
  file(GET_RUNTIME_DEPENDENCIES
    EXECUTABLES \"$<TARGET_FILE:weftd>\" \"$<TARGET_FILE:weftctl>\"
    MODULES \"$<TARGET_FILE:weftd_service>\"
    PRE_EXCLUDE_REGEXES \"\${_system}\" \"\${_torch}\"
    RESOLVED_DEPENDENCIES_VAR _libraries)
  foreach(_library IN LISTS _libraries)
    file(INSTALL \"\${_library}\" FOLLOW_SYMLINK_CHAIN
         DESTINATION \"\${CMAKE_INSTALL_PREFIX}/lib/weft\")
  endforeach()")
