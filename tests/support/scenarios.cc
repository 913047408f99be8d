#include "tests/support/scenarios.h"

#include <algorithm>
#include <filesystem>

namespace weft::testing {
namespace {

std::filesystem::path Folder() {
  return std::filesystem::path(WEFT_TESTS_DIR) / "dispatch" / "scenarios";
}

}  // namespace

std::string ScenarioPath(const std::string& name) {
  return Folder() / (name + ".txt");
}

std::vector<std::string> ScenarioNames() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(Folder())) {
    if (entry.path().extension() == ".txt") {
      names.push_back(entry.path().stem().string());
    }
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace weft::testing
