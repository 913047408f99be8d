#include "tests/support/scenarios.h"

#include <algorithm>
#include <filesystem>

namespace weft::testing {
namespace {

std::filesystem::path Folder(const std::string& module) {
  return std::filesystem::path(WEFT_TESTS_DIR) / module / "scenarios";
}

}  // namespace

std::string ScenarioPath(const std::string& module, const std::string& name) {
  return Folder(module) / (name + ".txt");
}

std::vector<std::string> ScenarioNames(const std::string& module) {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(Folder(module))) {
    if (entry.path().extension() == ".txt") {
      names.push_back(entry.path().stem().string());
    }
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace weft::testing
