// Scenarios: text files that a module's tests interpret.
#ifndef WEFT_TESTS_SUPPORT_SCENARIOS_H_
#define WEFT_TESTS_SUPPORT_SCENARIOS_H_

#include <string>
#include <vector>

namespace weft::testing {

// Returns the path of tests/MODULE/scenarios/NAME.txt.
[[nodiscard]] std::string ScenarioPath(const std::string& module,
                                       const std::string& name);

// Returns the names of the module's scenarios, sorted.
[[nodiscard]] std::vector<std::string> ScenarioNames(const std::string& module);

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_SCENARIOS_H_
