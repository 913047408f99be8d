// Finds names of functions of the running program, including local ones.
#ifndef WEFT_TESTS_SUPPORT_HOST_DEVICE_FUNCTION_NAME_H_
#define WEFT_TESTS_SUPPORT_HOST_DEVICE_FUNCTION_NAME_H_

#include <string>

namespace weft::testing {

// Returns the function's name in the source, without namespaces and arguments,
// or its address if the program has no symbols.
std::string FunctionName(const void* function);

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_HOST_DEVICE_FUNCTION_NAME_H_
