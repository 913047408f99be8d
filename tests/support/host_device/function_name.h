// Names of functions of the running program, local ones too.
#ifndef WEFT_TESTS_SUPPORT_HOST_DEVICE_FUNCTION_NAME_H_
#define WEFT_TESTS_SUPPORT_HOST_DEVICE_FUNCTION_NAME_H_

#include <string>

namespace weft::testing {

// The function's name in the source, without namespaces and arguments, or its
// address when the program was stripped of its symbols.
[[nodiscard]] std::string FunctionName(const void* function);

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_HOST_DEVICE_FUNCTION_NAME_H_
