#include "src/base/options/world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace weft {
namespace {

using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

absl::StatusOr<std::optional<World>> Read(const Variables& variables) {
  return WorldFromEnvironment(
      [&](const std::string& name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        if (found == variables.end()) return std::nullopt;
        return found->second;
      });
}

TEST(WorldTest, IsNotThereWithoutARank) {
  const auto world = Read({{"WORLD_SIZE", "4"}}).value();
  EXPECT_FALSE(world.has_value());
}

TEST(WorldTest, ReadsWhatTorchrunSets) {
  const auto world = Read({{"RANK", "5"},
                           {"WORLD_SIZE", "8"},
                           {"LOCAL_RANK", "1"},
                           {"LOCAL_WORLD_SIZE", "4"},
                           {"MASTER_ADDR", "node-0"},
                           {"MASTER_PORT", "29500"}})
                         .value();
  EXPECT_EQ(world->rank, 5);
  EXPECT_EQ(world->size, 8);
  EXPECT_EQ(world->local_rank, 1);
  EXPECT_EQ(world->local_size, 4);
  EXPECT_EQ(world->host, "node-0");
  EXPECT_EQ(world->port, 29500);
  EXPECT_FALSE(world->local());
}

TEST(WorldTest, KnowsThatAnAgentServesTheRendezvous) {
  Variables variables = {{"RANK", "0"},
                         {"WORLD_SIZE", "2"},
                         {"MASTER_ADDR", "a"},
                         {"MASTER_PORT", "7"}};
  EXPECT_FALSE((*Read(variables))->has_agent);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["TORCHELASTIC_RESTART_COUNT"] = "3";
  EXPECT_TRUE((*Read(variables))->has_agent);
  EXPECT_EQ((*Read(variables))->attempt, "3");
}

TEST(WorldTest, IsOnOneMachineUnlessToldOtherwise) {
  const auto world = Read({{"RANK", "1"},
                           {"WORLD_SIZE", "2"},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", "1"}})
                         .value();
  EXPECT_EQ(world->local_rank, 1);
  EXPECT_TRUE(world->local());
}

TEST(WorldTest, NamesTheVariableTheValueAndTheRange) {
  const Variables good = {{"RANK", "1"},
                          {"WORLD_SIZE", "2"},
                          {"MASTER_ADDR", "a"},
                          {"MASTER_PORT", "7"}};
  for (const auto& [name, value, range] :
       {std::tuple("RANK", "2", "[0, 1]"), std::tuple("RANK", "x", "[0, 1]"),
        std::tuple("WORLD_SIZE", "0", "[1, 4096]"),
        std::tuple("LOCAL_WORLD_SIZE", "3", "[1, 2]"),
        std::tuple("LOCAL_RANK", "2", "[0, 1]"),
        std::tuple("MASTER_PORT", "65536", "[1, 65535]")}) {
    Variables variables = good;
    variables[name] = value;
    const absl::Status status = Read(variables).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << name;
    EXPECT_THAT(
        std::string(status.message()),
        testing::AllOf(HasSubstr(name), HasSubstr(value), HasSubstr(range)));
  }
  Variables variables = good;
  variables.erase("MASTER_ADDR");
  EXPECT_THAT(std::string(Read(variables).status().message()),
              HasSubstr("MASTER_ADDR"));
}

TEST(WorldTest, HasTheRanksThatTheFlagsAskFor) {
  World world;
  world.size = 4;
  EXPECT_TRUE(CheckWorldSize(world, 2, 2).ok());
  EXPECT_THAT(std::string(CheckWorldSize(world, 2, 1).message()),
              testing::AllOf(HasSubstr("WORLD_SIZE=4"),
                             HasSubstr("--tensor-parallel-size=2"),
                             HasSubstr("--data-parallel-size=1")));
}

}  // namespace
}  // namespace weft
