#include "src/request/field_names.h"

#include <utility>

#include "gtest/gtest.h"

namespace weft {
namespace {

constexpr FieldName kNames[] = {{"data.targets", "rows[].labels"},
                                {"adamw", "adam"},
                                {"adamw.max_grad_norm", "adam.clip"},
                                {"data.spans.start", "rows[].parts[].from"}};

TEST(FieldNamesTest, AFieldHasTheNameOfTheInnermostScope) {
  EXPECT_EQ(NameOfField("adamw.beta1"), "adamw.beta1");
  {
    const FieldNameScope scope(kNames);
    const std::pair<const char*, const char*> names[] = {
        {"adamw.beta1", "adam.beta1"},
        {"adamw.max_grad_norm", "adam.clip"},
        {"adamw2", "adamw2"},
        {"adam", "adam"},
        {"data[3].targets[17]", "rows[3].labels[17]"},
        {"data[3].targets_per_token", "data[3].targets_per_token"},
        {"data[3].spans[4].start", "rows[3].parts[4].from"},
        {"data[3]", "data[3]"},
        {"data", "data"}};
    for (const auto& [path, name] : names) EXPECT_EQ(NameOfField(path), name);
    {
      const FieldNameScope none({});
      EXPECT_EQ(NameOfField("adamw.beta1"), "adamw.beta1");
    }
    EXPECT_EQ(NameOfField("adamw.beta1"), "adam.beta1");
  }
  EXPECT_EQ(NameOfField("adamw.beta1"), "adamw.beta1");
}

}  // namespace
}  // namespace weft
