# How tests are built and become entries of ctest.
find_package(GTest REQUIRED)
include(GoogleTest)
# tests/count.py reads the reports of GoogleTest and pytest here.
set(WEFT_TEST_REPORTS ${CMAKE_BINARY_DIR}/reports)
# Python with the packages of the tests.
find_program(WEFT_PYTHON python3 PATHS ${PROJECT_SOURCE_DIR}/.venv/bin NO_DEFAULT_PATH)

# The programs that only tests of label gate need. `all` does not build them.
add_custom_target(gate_programs)
function(weft_build_for_gates target)
  set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON)
  add_dependencies(gate_programs ${target})
endfunction()

# What makes LibTorch, oneDNN, MKL and kernels/cpu compute as on a processor
# without AVX512.
set(WEFT_AVX2_ENVIRONMENT ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
    MKL_ENABLE_INSTRUCTIONS=AVX2 GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F)

# What makes kernels/cpu compute as on any processor of its family.
set(WEFT_BASELINE_ENVIRONMENT
    GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA)

# weft_cc_test(NAME name [TORCH] [AVX2] [ALONE] [ISOLATED] [ONE_THREAD] [SHARDS n]
#              [PCH owner] SRCS ... DEPS ... LABELS ...)
# The program is one ctest entry, because a program that links LibTorch takes
# longer to start than most tests take to run. The entry has LABELS for
# `tests/run.sh LABEL`, and its report lists each TEST. `ctest -C single` also
# has one entry for each TEST.
# AVX2: results depend on the processor's instructions, so a gate runs the
# program once more with WEFT_AVX2_ENVIRONMENT.
# ALONE: the sources use the same names, so they cannot be one unit. A test whose
# names clash can also have a namespace of its own, inside that of its module.
# ISOLATED: each TEST is always an entry of its own, and so has its own process.
# SHARDS: the tests of a long program are split into n entries, which can run at
# the same time.
# ONE_THREAD: the tests and the tested code start no threads and take no locks,
# so the thread sanitizer's build leaves the program out.
# tests/lint/one_thread_test.py checks this.
function(weft_cc_test)
  cmake_parse_arguments(A "ALONE;AVX2;TORCH;ISOLATED;ONE_THREAD" "NAME;PCH;SHARDS;TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  if((A_TORCH AND NOT WEFT_WITH_TORCH) OR
     (A_ONE_THREAD AND WEFT_SANITIZER STREQUAL "thread"))
    return()
  endif()
  # Without LibTorch and kernels, the programs of a build with CUDA would be
  # those of preset cpu.
  if(WEFT_WITH_CUDA AND NOT A_TORCH AND NOT weft::kernels_cuda IN_LIST A_DEPS)
    return()
  endif()
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 300)
  endif()
  if(NOT A_LABELS)
    set(A_LABELS unit)
  endif()
  add_executable(${A_NAME} ${A_SRCS})
  weft_not_fuzzed(${A_NAME})
  if(NOT A_ALONE)
    weft_compile_in_units(${A_NAME})
  endif()
  # Saves two fifths of the compile time. The tested code keeps the product's
  # flags.
  target_compile_options(${A_NAME} PRIVATE -Og)
  if(gate IN_LIST A_LABELS)
    weft_build_for_gates(${A_NAME})
  endif()
  if(A_TORCH)
    set(A_PCH weft_torch_pch)
  elseif(NOT DEFINED A_PCH AND TARGET weft_test_pch)
    set(A_PCH weft_test_pch)
  endif()
  if(A_PCH)
    weft_use_pch(${A_NAME} ${A_PCH})
  endif()
  target_link_libraries(${A_NAME} PRIVATE weft_flags ${A_DEPS} GTest::gmock
                        GTest::gtest GTest::gtest_main)
  if(A_TORCH)
    target_link_libraries(${A_NAME} PRIVATE weft_torch weft_fresh_torch)
  endif()
  set(environment
      TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/support/tsan.supp)
  list(GET A_LABELS 0 first_label)  # gtest_discover_tests takes one.
  # Discovery runs the program, which may have to read LibTorch from the disk.
  # The default timeout of 5 s is too short for this.
  gtest_discover_tests(${A_NAME} DISCOVERY_MODE PRE_TEST NO_PRETTY_VALUES
    DISCOVERY_TIMEOUT 60 PROPERTIES LABELS ${first_label}
    TIMEOUT ${A_TIMEOUT} ENVIRONMENT "${environment}")
  if(A_ISOLATED)
    return()
  endif()
  _weft_discover_only_for_single()
  if(NOT A_SHARDS)
    set(A_SHARDS 1)
  endif()
  foreach(shard RANGE 1 ${A_SHARDS})
    set(entry ${A_NAME})
    if(A_SHARDS GREATER 1)
      set(entry ${A_NAME}.${shard})
    endif()
    math(EXPR index "${shard} - 1")
    add_test(NAME ${entry}
      COMMAND ${A_NAME} --gtest_output=xml:${WEFT_TEST_REPORTS}/${entry}.xml)
    set_tests_properties(${entry} PROPERTIES LABELS "${A_LABELS}" TIMEOUT ${A_TIMEOUT} ENVIRONMENT
      "${environment};GTEST_TOTAL_SHARDS=${A_SHARDS};GTEST_SHARD_INDEX=${index}")
  endforeach()
  if(A_AVX2 AND NOT WEFT_WITH_CUDA)
    add_test(NAME ${A_NAME}.avx2
      COMMAND ${A_NAME} --gtest_output=xml:${WEFT_TEST_REPORTS}/${A_NAME}.avx2.xml)
    set_tests_properties(${A_NAME}.avx2 PROPERTIES LABELS "avx2;gate"
      TIMEOUT ${A_TIMEOUT} ENVIRONMENT "${environment};${WEFT_AVX2_ENVIRONMENT}")
  endif()
endfunction()

# gtest_discover_tests() has just written a file for ctest. Makes ctest read
# this file only under `ctest -C single`.
function(_weft_discover_only_for_single)
  get_directory_property(files TEST_INCLUDE_FILES)
  list(POP_BACK files discovery)
  set(guarded ${discovery}.single.cmake)
  file(WRITE ${guarded} "if(CTEST_CONFIGURATION_TYPE STREQUAL \"single\")
  include([==[${discovery}]==])
endif()
")
  set_property(DIRECTORY PROPERTY TEST_INCLUDE_FILES ${files} ${guarded})
endfunction()

# weft_py_test(NAME name [CONFIGURATIONS name] FILES ... [ARGUMENTS ...] LABELS ...
#              [TIMEOUT seconds] [SHARDS n])
# Makes a pytest run of FILES one ctest entry, whose report lists each test.
# SHARDS: the tests are split into n entries by their models (support/shards.py).
# WEFT_ENTRIES has the names of the entries afterwards.
# Python keeps compiled modules in the build folder, also where the environment
# forbids it. Compiling transformers takes as long as its import. No test needs
# the plugin of anyio, whose import is a quarter of pytest's start.
function(weft_py_test)
  cmake_parse_arguments(A "" "NAME;SHARDS;TIMEOUT" "CONFIGURATIONS;FILES;ARGUMENTS;LABELS" ${ARGN})
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 300)
  endif()
  set(python python3)
  if(WEFT_PYTHON)
    set(python ${WEFT_PYTHON})
  endif()
  set(entries ${A_NAME})
  set(path ${PROJECT_SOURCE_DIR}/client/python)
  if(A_SHARDS)
    set(entries)
    foreach(shard RANGE 1 ${A_SHARDS})
      list(APPEND entries ${A_NAME}.${shard})
    endforeach()
    string(APPEND path :${PROJECT_SOURCE_DIR}/tests/support)
  endif()
  foreach(entry ${entries})
    set(part)
    if(A_SHARDS)
      string(REPLACE ${A_NAME}. "" shard ${entry})
      set(part -p shards --shard=${shard}/${A_SHARDS})
    endif()
    add_test(NAME ${entry} CONFIGURATIONS ${A_CONFIGURATIONS}
      COMMAND ${python} -m pytest -q -rs -p no:cacheprovider -p no:anyio ${part}
              --junitxml=${WEFT_TEST_REPORTS}/${entry}.xml ${A_FILES} ${A_ARGUMENTS}
      WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    set_tests_properties(${entry} PROPERTIES LABELS "${A_LABELS}" TIMEOUT ${A_TIMEOUT}
      ENVIRONMENT "PYTHONPATH=${path};WEFT_BUILD_DIR=${CMAKE_BINARY_DIR};PYTHONDONTWRITEBYTECODE=;PYTHONPYCACHEPREFIX=${CMAKE_BINARY_DIR}/pycache")
  endforeach()
  set(WEFT_ENTRIES ${entries} PARENT_SCOPE)
endfunction()
