#include "src/request/move_unit.h"

#include <gtest/gtest.h>

#include <string>

namespace weft {
namespace {

const std::string kSession(32, 'a');

TEST(MoveUnitTest, ModelsAreOfTheirSession) {
  EXPECT_EQ(UnitOf(kSession + ".train.0"), kSession);
  EXPECT_EQ(UnitOf("t~" + kSession + ".train.12"), kSession);
  EXPECT_EQ(UnitOf(kSession), kSession);
  for (const std::string& own :
       {std::string(""), std::string("a0"), "t~" + kSession,
        kSession + "a.train.0", kSession + ".sample.0",
        kSession.substr(1) + ".train.0", kSession + ".train"}) {
    EXPECT_EQ(UnitOf(own), own);
  }
}

TEST(MoveUnitTest, NotesAreOfTheSessionTheyName) {
  for (const char* const kind :
       {"session", "model", "sampler", "making", "loss"}) {
    const std::string name = "tinker/" + std::string(kind) + "/" + kSession;
    EXPECT_EQ(UnitOfNote(name), kSession);
    EXPECT_EQ(UnitOfNote(name + ":x:1"), kSession);
    EXPECT_EQ(UnitOfNote(name + "x"), "");
    EXPECT_EQ(UnitOfNote(name.substr(0, name.size() - 1)), "");
  }
  for (const char* const name :
       {"tinker/usage/", "tinker/orphan/", "samples/session/", "session/"}) {
    EXPECT_EQ(UnitOfNote(name + kSession), "");
  }
}

}  // namespace
}  // namespace weft
