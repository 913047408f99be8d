// Scenarios: text files that tests/dispatch/scenario_test.cc interprets.
#ifndef WEFT_TESTS_SUPPORT_SCENARIOS_H_
#define WEFT_TESTS_SUPPORT_SCENARIOS_H_

#include <string>
#include <vector>

namespace weft::testing {

// Returns the path of tests/dispatch/scenarios/NAME.txt.
std::string ScenarioPath(const std::string& name);

// Returns the names of the scenarios, sorted.
std::vector<std::string> ScenarioNames();

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_SCENARIOS_H_
