# One static library a directory, its tests beside it. Sources are found by name, so that adding a file is enough:
#   *_test.cc   tests of the library, one GoogleTest binary each directory
#   *_fuzz.cc   fuzz targets, one binary a file
#   *_none.cc   what stands in for cuda/*.cu in a build without CUDA
#   cuda/*.cu   the CUDA back end
#   the rest    the library
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

add_library(tessera_options INTERFACE)
target_compile_options(tessera_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Werror>")
target_compile_options(tessera_options INTERFACE
                       "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings;-Xcompiler=-Wall,-Wextra>")
# fmt 9 turns constexpr off under nvcc and then calls its own functions from constexpr ones.
target_compile_definitions(tessera_options INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:FMT_USE_CONSTEXPR=1>)
target_include_directories(tessera_options INTERFACE ${CMAKE_SOURCE_DIR}/src)
# No trapping arithmetic: lets the compiler vectorise selects. Signs of zero, NaN and order of sums stay as written.
target_compile_options(tessera_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno;-fno-trapping-math>")
if(TESSERA_NATIVE)
  target_compile_options(tessera_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=native>)
else()
  target_compile_options(tessera_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=x86-64-v3>)
endif()
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined;-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  target_link_options(tessera_options INTERFACE -fsanitize=address,undefined)
endif()
if(TESSERA_FUZZ)
  # Coverage in the libraries too: without it the fuzzer sees nothing of what its inputs reach.
  target_compile_options(tessera_options INTERFACE -fsanitize=fuzzer-no-link)
  add_custom_target(fuzzers)
endif()

# tessera_library(NAME DIR [DEPS...]): library `tessera_NAME` from DIR/*.cc, test `NAME_test` from DIR/*_test.cc.
function(tessera_library name dir)
  file(GLOB sources CONFIGURE_DEPENDS ${dir}/*.cc)
  set(tests ${sources})
  set(fuzzers ${sources})
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  list(FILTER fuzzers INCLUDE REGEX "_fuzz\\.cc$")
  list(FILTER sources EXCLUDE REGEX "_(test|fuzz)\\.cc$")
  if(TESSERA_CUDA)
    file(GLOB cuda_sources CONFIGURE_DEPENDS ${dir}/cuda/*.cu)
    list(FILTER sources EXCLUDE REGEX "_none\\.cc$")
    list(APPEND sources ${cuda_sources})
  endif()
  if(sources)
    add_library(tessera_${name} STATIC ${sources})
    target_link_libraries(tessera_${name} PUBLIC tessera_options OpenMP::OpenMP_CXX fmt::fmt ${ARGN})
  else()
    add_library(tessera_${name} INTERFACE)
    target_link_libraries(tessera_${name} INTERFACE tessera_options OpenMP::OpenMP_CXX fmt::fmt ${ARGN})
  endif()
  if(TESSERA_TESTS AND tests)
    add_executable(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE tessera_${name} GTest::gtest_main)
    add_test(NAME ${name} COMMAND ${name}_test)
  endif()
  if(TESSERA_FUZZ)
    foreach(file ${fuzzers})
      get_filename_component(target ${file} NAME_WE)
      add_executable(${target} ${file})
      set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fuzz)
      add_dependencies(fuzzers ${target})
      target_link_options(${target} PRIVATE -fsanitize=fuzzer)
      target_link_libraries(${target} PRIVATE tessera_${name})
    endforeach()
  endif()
endfunction()
