# Defines one helper for each kind of target, so that a module's CMakeLists.txt
# is a list of names. Dependencies are explicit. tests/lint/layering_test.py
# checks that the includes agree with src/layers.txt.

find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(PkgConfig REQUIRED)
# The prefix is WEFT_RE2: with the prefix re2, gRPC's own search for re2 would
# fail.
pkg_check_modules(WEFT_RE2 REQUIRED IMPORTED_TARGET re2)
# Removes -pthread, which would not agree with the precompiled headers. The
# library in src/base links Threads::Threads instead.
set_property(TARGET PkgConfig::WEFT_RE2 PROPERTY INTERFACE_COMPILE_OPTIONS "")
# libisal computes CRC32C and CRC-32 with the processor's instructions.
pkg_check_modules(WEFT_ISAL REQUIRED IMPORTED_TARGET libisal)
# libcurl calls object stores.
pkg_check_modules(WEFT_CURL REQUIRED IMPORTED_TARGET libcurl)
find_package(Protobuf CONFIG QUIET)
if(NOT Protobuf_FOUND)
  find_package(Protobuf REQUIRED)
endif()
add_library(weft_protobuf INTERFACE)
target_link_libraries(weft_protobuf INTERFACE protobuf::libprotobuf)
if(WEFT_SANITIZER STREQUAL "thread")
  # In instrumented sources, protobuf's map fields have two more members than in
  # the library, which is not instrumented. So the first flag hides the
  # instrumentation from protobuf. The second flag still shows the
  # instrumentation to libstdc++.
  target_compile_options(weft_protobuf INTERFACE
    -U__SANITIZE_THREAD__ -D_GLIBCXX_TSAN=1)
endif()
if(WEFT_WITH_GRPC)
  find_package(gRPC REQUIRED)
endif()
find_package(prometheus-cpp REQUIRED)

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # ccache can cache precompiled headers only if it may ignore their time
  # stamps. Paths relative to the project let clones and build folders share the
  # cache. With the inode cache, ccache hashes a precompiled header of 400 MB
  # once instead of for each source.
  # The launcher is `env`, because `cmake -E env` would take 10 ms for each
  # object.
  set(CMAKE_CXX_COMPILER_LAUNCHER env
      CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 CCACHE_INODECACHE=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${CCACHE_PROGRAM})
  # With CCACHE_DEPEND, ccache identifies a result by the files that the
  # compiler read, not by the preprocessed source. Preprocessing has two
  # problems. nvcc preprocesses a source once for each architecture. And if an
  # old precompiled header exists, the preprocessor reads the old file instead
  # of the changed headers, so that ccache would return the old precompiled
  # header.
  set(_by_dependencies ${CMAKE_CXX_COMPILER_LAUNCHER})
  list(INSERT _by_dependencies 1 CCACHE_DEPEND=1)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${_by_dependencies})
  set(WEFT_PCH_COMPILER_LAUNCHER ${_by_dependencies})
endif()

# weft_precompile(OWNER HEADER): the library OWNER owns the precompiled header.
# CMake gets HEADER in angle brackets. Otherwise CMake would write the clone's
# path into the precompiled header, and clones could not share the objects that
# use it.
function(weft_precompile owner header)
  file(RELATIVE_PATH _path ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/${header})
  target_precompile_headers(${owner} PUBLIC <${_path}>)
  if(WEFT_PCH_COMPILER_LAUNCHER)
    set_target_properties(${owner} PROPERTIES
      CXX_COMPILER_LAUNCHER "${WEFT_PCH_COMPILER_LAUNCHER}")
  endif()
endfunction()

# GCC collects its garbage often in a heap of its default size. A larger one
# saves a fifteenth of its time and takes up to 240 MB more for each source.
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  add_compile_options(
    $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=2000000>
    $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-expand=500>)
endif()

# The flags of every target of Weft. Third-party headers are SYSTEM.
add_library(weft_flags INTERFACE)
target_include_directories(weft_flags INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(weft_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers
    $<$<BOOL:${WEFT_WERROR}>:-Werror>
    $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>>)
if(WEFT_SANITIZER)
  string(REPLACE ";" "," _weft_sanitizers "${WEFT_SANITIZER}")
  target_compile_options(weft_flags INTERFACE -fsanitize=${_weft_sanitizers}
                         -fno-omit-frame-pointer -fno-sanitize-recover=all
                         # Clang would warn that it does not vectorise
                         # loops with checks.
                         $<$<CXX_COMPILER_ID:Clang>:-Wno-pass-failed>
                         $<$<BOOL:$<TARGET_PROPERTY:WEFT_NOT_FUZZED>>:-fno-sanitize=fuzzer-no-link>)
  target_link_options(weft_flags INTERFACE -fsanitize=${_weft_sanitizers})
endif()

# weft_not_fuzzed(TARGET...): the targets do not count their coverage, because no
# fuzzer runs them. Counting would double the time of the kernels' tests.
function(weft_not_fuzzed)
  if(WEFT_BUILD_FUZZERS)
    set_target_properties(${ARGN} PROPERTIES WEFT_NOT_FUZZED ON)
  endif()
endfunction()

# LibTorch from the wheel of the project's .venv (deploy/setup.sh). The wheel's
# own CMake files need a whole CUDA toolkit even for a CPU build, so this file
# defines the target. The wheel's include folder has old protobuf headers. The
# folder comes last (-idirafter), so that the system's headers come first.
if(WEFT_WITH_TORCH)
  file(GLOB _weft_torch_candidates
       ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
  if(_weft_torch_candidates)
    list(GET _weft_torch_candidates 0 _weft_torch_default)
  endif()
  set(WEFT_TORCH_DIR "${_weft_torch_default}" CACHE PATH "Folder of the torch wheel")
  if(NOT EXISTS "${WEFT_TORCH_DIR}/lib/libtorch_cpu.so")
    message(FATAL_ERROR "No LibTorch in WEFT_TORCH_DIR='${WEFT_TORCH_DIR}'. "
                        "Run deploy/setup.sh, or configure with -DWEFT_WITH_TORCH=OFF.")
  endif()
  # In some wheels the library's name has a hash.
  file(GLOB _weft_openmp ${WEFT_TORCH_DIR}/lib/libgomp*.so*)
  if(NOT _weft_openmp)
    message(FATAL_ERROR "No libgomp in ${WEFT_TORCH_DIR}/lib.")
  endif()
  add_library(weft_torch INTERFACE)
  # at::parallel_for is a template, so it runs on one thread in callers that are
  # compiled without OpenMP. The OpenMP runtime is LibTorch's own, so that there
  # is only one pool of threads.
  target_compile_options(weft_torch INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>
    $<$<COMPILE_LANGUAGE:CXX>:-idirafter${WEFT_TORCH_DIR}/include>)
  # The wheel's libraries use symbols of CUDA libraries that a CPU host lacks.
  # Such symbols are resolved at run time, and only for the parts that are used.
  target_link_options(weft_torch INTERFACE -Wl,--allow-shlib-undefined
    -Wl,--no-as-needed)
  target_link_libraries(weft_torch INTERFACE
    ${WEFT_TORCH_DIR}/lib/libtorch_cpu.so ${WEFT_TORCH_DIR}/lib/libc10.so
    ${_weft_openmp})
  if(WEFT_WITH_CUDA)
    target_link_libraries(weft_torch INTERFACE
      ${WEFT_TORCH_DIR}/lib/libtorch_cuda.so ${WEFT_TORCH_DIR}/lib/libc10_cuda.so)
  endif()
endif()

if(WEFT_WITH_CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

# weft_link_only(NAME TARGET)
# Defines the library NAME. Targets that link NAME also link TARGET, but get no
# compile flags from TARGET.
function(weft_link_only name target)
  add_library(${name} INTERFACE)
  target_link_libraries(${name} INTERFACE $<LINK_ONLY:${target}>)
endfunction()

# weft_asks_for_cuda(FILE...)
# Names the sources of this folder that depend on whether the build has CUDA.
# In builds with CUDA only these sources get the macro WEFT_WITH_CUDA=1, and can
# include CUDA's headers. In builds without CUDA the whole folder gets
# WEFT_WITH_CUDA=0, because CMake keeps a source with a macro of its own out of
# the units. The objects of other folders have the same compile commands in both
# kinds of builds, which share the compiler cache.
function(weft_asks_for_cuda)
  if(WEFT_WITH_CUDA)
    list(TRANSFORM CUDAToolkit_INCLUDE_DIRS PREPEND -isystem OUTPUT_VARIABLE options)
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS ${options})
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_DEFINITIONS WEFT_WITH_CUDA=1)
  else()
    add_compile_definitions(WEFT_WITH_CUDA=0)
  endif()
  list(TRANSFORM ARGN PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/ OUTPUT_VARIABLE paths)
  set_property(GLOBAL APPEND PROPERTY WEFT_ASKS_FOR_CUDA ${paths})
endfunction()

# weft_use_pch(TARGET OWNER): TARGET uses the precompiled header of OWNER.
function(weft_use_pch target owner)
  target_precompile_headers(${target} REUSE_FROM ${owner})
  # An executable's -fPIE would not agree with headers precompiled with -fPIC.
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
endfunction()

# weft_compile_in_units(TARGET): with WEFT_UNITY, up to 12 sources of TARGET are
# one unit of the compiler, which reads the headers that they share once.
# Sources with flags of their own stay alone, except those with -O2, which share
# units. CMake's UNITY_BUILD would write the clone's path into the units, and
# clones could not share their objects.
function(weft_compile_in_units target)
  if(WEFT_UNITY)
    # At the end of the folder's file, all sources have their flags.
    cmake_language(EVAL CODE "cmake_language(DEFER CALL _weft_make_units ${target})")
  endif()
endfunction()

function(_weft_make_units target)
  get_target_property(sources ${target} SOURCES)
  set(kept)
  set(hot)
  set(others)
  foreach(source ${sources})
    get_filename_component(path ${source} ABSOLUTE)
    file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR} ${path})
    get_source_file_property(definitions ${source} COMPILE_DEFINITIONS)
    get_source_file_property(options ${source} COMPILE_OPTIONS)
    if(NOT path MATCHES "^[a-z].*\\.cc$" OR path MATCHES "^build/" OR definitions)
      list(APPEND kept ${source})
    elseif(options STREQUAL -O2)
      list(APPEND hot ${path})
    elseif(options)
      list(APPEND kept ${source})
    else()
      list(APPEND others ${path})
    endif()
  endforeach()
  set(number 0)
  foreach(kind hot others)
    while(${kind})
      list(SUBLIST ${kind} 0 12 paths)
      list(REMOVE_ITEM ${kind} ${paths})
      list(TRANSFORM paths REPLACE "(.+)" "#include \"\\1\"\n")
      list(JOIN paths "" content)
      set(file ${CMAKE_CURRENT_BINARY_DIR}/units/${target}_${number}.cc)
      file(CONFIGURE OUTPUT ${file} CONTENT "${content}" @ONLY)
      if(kind STREQUAL "hot")
        set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS -O2)
      endif()
      list(APPEND kept ${file})
      math(EXPR number "${number} + 1")
    endwhile()
  endforeach()
  set_target_properties(${target} PROPERTIES SOURCES "${kept}")
endfunction()

# weft_compile_cold(TARGET): in builds with -O2, TARGET gets -Og, which saves a
# third of its compile time. Sanitizers' builds and Debug keep their own level.
function(weft_compile_cold target)
  if(NOT WEFT_SANITIZER AND NOT CMAKE_BUILD_TYPE STREQUAL Debug)
    target_compile_options(${target} PRIVATE -Og)
  endif()
endfunction()

# weft_cc_library(NAME name [TORCH] [COLD] HDRS ... SRCS ... [CUDA ...] [HOT ...]
#                 DEPS ...)
# HDRS are the headers that have no source of the same name.
# CUDA are sources only of builds with CUDA.
# TORCH compiles against LibTorch with the shared precompiled header.
# COLD: loops over values or bytes take a small part of a request's time, except
# in the sources HOT. The others are compiled cold.
function(weft_cc_library)
  cmake_parse_arguments(A "COLD;TORCH" "NAME" "HDRS;SRCS;CUDA;HOT;DEPS" ${ARGN})
  if(A_TORCH AND NOT WEFT_WITH_TORCH)
    return()
  endif()
  set(target weft_${A_NAME})
  foreach(source ${A_SRCS} ${A_CUDA})
    string(REGEX REPLACE "\\.c[cu]$" ".h" header ${source})
    if(NOT header STREQUAL source AND EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${header})
      list(APPEND A_HDRS ${header})
    endif()
  endforeach()
  if(WEFT_WITH_CUDA)
    list(APPEND A_SRCS ${A_CUDA})
  endif()
  if(A_SRCS)
    add_library(${target} STATIC ${A_SRCS})
    set_target_properties(${target} PROPERTIES WEFT_SOURCES "${A_SRCS}")
    weft_compile_in_units(${target})
    if(A_COLD)
      weft_compile_cold(${target})
      if(NOT WEFT_SANITIZER)
        set_source_files_properties(${A_HOT} PROPERTIES COMPILE_OPTIONS -O2)
      endif()
    endif()
    set(scope PUBLIC)
    if(A_TORCH)
      weft_use_pch(${target} weft_torch_pch)
    endif()
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(weft::${A_NAME} ALIAS ${target})
  target_sources(${target} ${scope} FILE_SET HEADERS
                 BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${A_HDRS})
  set_target_properties(${target} PROPERTIES VERIFY_INTERFACE_HEADER_SETS ON)
  target_link_libraries(${target} ${scope} weft_flags ${A_DEPS})
  if(A_TORCH)
    target_link_libraries(${target} ${scope} weft_torch)
  elseif(A_SRCS)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Wconversion -Wno-sign-conversion>)
  endif()
endfunction()

# weft_proto_library(TARGET FILE): the messages of a .proto file of this folder.
function(weft_proto_library target file)
  set(proto ${CMAKE_CURRENT_SOURCE_DIR}/${file})
  string(REGEX REPLACE "proto$" "pb" generated ${CMAKE_CURRENT_BINARY_DIR}/${file})
  add_custom_command(
    OUTPUT ${generated}.cc ${generated}.h
    COMMAND protobuf::protoc -I ${PROJECT_SOURCE_DIR}
            --cpp_out=${PROJECT_BINARY_DIR} ${proto}
    DEPENDS ${proto}
    COMMENT "Generating ${file}")
  add_library(${target} STATIC ${generated}.cc)
  target_include_directories(${target} SYSTEM PUBLIC ${PROJECT_BINARY_DIR})
  target_link_libraries(${target} PUBLIC weft_protobuf)
  weft_compile_cold(${target})
endfunction()

# weft_cc_binary(NAME name [TORCH] SRCS ... DEPS ...)
function(weft_cc_binary)
  cmake_parse_arguments(A "TORCH" "NAME" "SRCS;DEPS" ${ARGN})
  if(A_TORCH AND NOT WEFT_WITH_TORCH)
    return()
  endif()
  add_executable(${A_NAME} ${A_SRCS})
  target_link_libraries(${A_NAME} PRIVATE weft_flags ${A_DEPS})
  if(A_TORCH)
    weft_use_pch(${A_NAME} weft_torch_pch)
    target_link_libraries(${A_NAME} PRIVATE weft_torch)
  endif()
endfunction()
