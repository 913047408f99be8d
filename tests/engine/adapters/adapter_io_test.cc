#include "src/engine/adapters/adapter_io.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"
#include "src/base/reason.h"
#include "src/checkpoint/disk_checkpoints.h"
#include "src/checkpoint/object_checkpoints.h"
#include "src/lora/adapter_layout.h"
#include "tests/support/failpoints.h"
#include "tests/support/memory_store.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft::engine::adapter_io_test {
namespace {

std::unique_ptr<checkpoint::CheckpointFiles> Disk(const std::string& folder,
                                                  uint64_t reserve = 0) {
  return std::make_unique<checkpoint::DiskCheckpoints>(folder, reserve);
}

using nlohmann::json;

constexpr auto kDataLoss = absl::StatusCode::kDataLoss;
constexpr model_config::ModelShape kShape = {.num_layers = 2,
                                             .hidden = 4,
                                             .q_width = 6,
                                             .kv_width = 2,
                                             .ffn = 8,
                                             .vocab = 10};

const lora::BaseModel kBase = {
    .name = "base", .fingerprint = "0123456789abcdef", .shape = kShape};

// Returns a config with one override of every kind.
LoraConfig Uneven() {
  return {
      .rank = 3,
      .alpha = 5,
      .target_modules = {TargetModule::kQProj, TargetModule::kVProj,
                         TargetModule::kLmHead, TargetModule::kEmbedTokens},
      .seed = 77,
      .overrides = {{0, TargetModule::kVProj, {}},
                    {1, TargetModule::kQProj, {.rank = 2, .alpha = 1.5}},
                    {2, TargetModule::kEmbedTokens, {.rank = 1, .alpha = 5}}}};
}

lora::AdapterState StateOf(const LoraConfig& config) {
  std::vector<float> values(
      lora::AdapterLayout(kShape, config).num_parameters());
  std::iota(values.begin(), values.end(), 1.0F);
  lora::AdapterState state{
      .weights = values, .optim_steps = 4, .optimizer = Optimizer::kMuon};
  for (auto* buffer : {&state.gradient, &state.moment1, &state.moment2}) {
    for (float& value : values) value += 0.25F;
    *buffer = values;
  }
  return state;
}

class AdapterIoTest : public ::testing::Test {
 protected:
  static AdapterCopy CopyOf(const LoraConfig& config) {
    return {.tenant = "t",
            .config = config,
            .state = StateOf(config),
            .last_step = 9};
  }

  void Save(const LoraConfig& config) {
    ASSERT_THAT(io_.Save({.adapter_id = "a", .name = "c", .overwrite = true},
                         CopyOf(config)),
                IsOk());
  }

  // Saves a small adapter.
  absl::StatusOr<CheckpointInfo> SaveAs(const SaveCheckpointRequest& request) {
    return io_.Save(request, CopyOf({.rank = 2, .alpha = 3}));
  }

  // Returns the files of a download of the adapter "a".
  PeftFiles Downloaded(const std::string& name) {
    const auto files = io_.Download("a", name).value();
    PeftFiles contents;
    for (const FileSource& file : files) {
      contents.emplace_back(file.name(), *file.Read(0, file.size()));
    }
    return contents;
  }

  // Changes the fields in the manifest.
  template <typename Edit>
  void EditFields(const std::string& name, Edit edit) {
    const std::filesystem::path path = folder_ / "a" / name / "MANIFEST.json";
    json manifest = json::parse(std::ifstream(path));
    edit(manifest["fields"]);
    std::ofstream(path) << manifest;
  }
  template <typename Edit>
  void EditConfig(Edit edit) {
    EditFields("c", [&](json& fields) { edit(fields["config"]); });
  }

  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    const auto infos = io_.List("a").value();
    for (const CheckpointInfo& info : infos) names.push_back(info.name);
    return names;
  }

  const TempFolder temporary_;
  const std::filesystem::path folder_ = temporary_.path();
  AdapterIo io_{Disk(folder_), kBase};
  // Of what Save has saved.
  const LoadCheckpointRequest load_{.source_adapter_id = "a", .name = "c"};
};

TEST_F(AdapterIoTest, AnUploadIsTheDownloadUnderAnotherName) {
  for (const CheckpointKind kind :
       {CheckpointKind::kTrain, CheckpointKind::kSampler}) {
    const SaveCheckpointRequest save{.adapter_id = "a",
                                     .name = CheckpointKindName(kind),
                                     .kind = kind,
                                     .metadata = {{"k", "v"}},
                                     .ttl_seconds = 60};
    ASSERT_THAT(io_.Save(save, CopyOf(Uneven())), IsOk());
    const PeftFiles files = Downloaded(save.name);
    EXPECT_EQ(files.size(), kind == CheckpointKind::kTrain ? 4u : 3u);
    UploadCheckpointRequest upload{.adapter_id = "b",
                                   .name = save.name,
                                   .tenant = "other",
                                   .files = files};
    const auto info = io_.Upload(upload).value();
    EXPECT_EQ(info.config, Uneven());
    EXPECT_EQ(info.tenant, "other");
    EXPECT_EQ(info.last_step, 9);
    EXPECT_EQ(info.metadata, save.metadata);
    EXPECT_EQ(info.expires_at, absl::InfiniteFuture());
    EXPECT_THAT(io_.Upload(upload),
                IsStatus(absl::StatusCode::kAlreadyExists, ""));
    upload.overwrite = true;
    EXPECT_THAT(io_.Upload(upload), IsOk());
    const auto loaded =
        io_.Load({.source_adapter_id = "b",
                  .name = save.name,
                  .weights_only = kind == CheckpointKind::kSampler})
            .value();
    EXPECT_EQ(loaded.state.weights, StateOf(Uneven()).weights);
    EXPECT_EQ(loaded.state.moment2.empty(), kind == CheckpointKind::kSampler);
  }
}

TEST_F(AdapterIoTest, ACopyThatIsAskedForAgainIsTheFirstOne) {
  for (const CheckpointKind kind :
       {CheckpointKind::kTrain, CheckpointKind::kSampler}) {
    const std::string name = CheckpointKindName(kind);
    ASSERT_THAT(io_.Save({.adapter_id = "a",
                          .name = name,
                          .kind = kind,
                          .metadata = {{"k", "v"}},
                          .ttl_seconds = 60},
                         CopyOf(Uneven())),
                IsOk());
    const UploadCheckpointRequest copy{
        .adapter_id = "b", .name = name, .source_adapter_id = "a"};
    const auto first = io_.Copy(copy).value();
    const auto again = io_.Copy(copy).value();
    EXPECT_LT(absl::AbsDuration(again.created_at - first.created_at),
              absl::Microseconds(1));
    // Another state under the source's name is another copy.
    AdapterCopy other = CopyOf(Uneven());
    other.state.weights[1] += 1;
    ASSERT_THAT(
        io_.Save(
            {.adapter_id = "a", .name = name, .overwrite = true, .kind = kind},
            other),
        IsOk());
    EXPECT_THAT(io_.Copy(copy), IsStatus(absl::StatusCode::kAlreadyExists, ""));
  }
}

TEST_F(AdapterIoTest, FilesThatAreNoCheckpointAreNotWritten) {
  Save(Uneven());
  const PeftFiles good = Downloaded("c");
  // Uploads the good files. `edit` changes the file `name`; nullopt omits it.
  const auto upload =
      [&](const std::string& name,
          const std::function<std::optional<std::string>(const std::string&)>&
              edit) {
        UploadCheckpointRequest request{.adapter_id = "b", .name = "c"};
        for (const auto& [file, contents] : good) {
          const auto changed =
              file == name ? edit(contents) : std::optional(contents);
          if (changed) request.files.emplace_back(file, *changed);
        }
        return io_.Upload(request).status();
      };
  const auto field = [](const char* key, const json& value) {
    return [key, value](const std::string& text) -> std::optional<std::string> {
      json state = json::parse(text);
      state[key] = value;
      return state.dump();
    };
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const std::string state = "trainer_state.json";
  const auto gone = [](const std::string&) { return std::nullopt; };
  const auto half = [](const std::string& text) {
    return std::optional(text.substr(0, text.size() / 2));
  };
  EXPECT_THAT(upload(state, gone), IsStatus(kInvalid, state));
  EXPECT_THAT(upload(state, half), IsStatus(kInvalid, state));
  EXPECT_THAT(upload(state, field("kind", "other")), IsStatus(kInvalid, state));
  EXPECT_THAT(upload(state, field("kind", "sampler")),
              IsStatus(kInvalid, "has no file optimizer.safetensors"));
  EXPECT_THAT(upload(state, field("last_step", uint64_t{1} << 63)),
              IsStatus(kInvalid, state));
  EXPECT_THAT(upload(state, field("base_fingerprint", "another")),
              IsStatus(absl::StatusCode::kFailedPrecondition, "fingerprint"));
  for (const char* const file :
       {"adapter_config.json", "adapter_model.safetensors",
        "optimizer.safetensors"}) {
    EXPECT_THAT(upload(file, half), IsStatus(kInvalid, "")) << file;
    EXPECT_THAT(upload(file, gone), IsStatus(kInvalid, "")) << file;
  }
  EXPECT_FALSE(std::filesystem::exists(folder_ / "b"));
}

TEST_F(AdapterIoTest, WhatHasExpiredIsNotDownloaded) {
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "c"}), IsOk());
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "old", .ttl_seconds = 60}),
              IsOk());
  EditFields("old", [](json& fields) { fields["created_at"] = 1; });
  EXPECT_THAT(io_.Download("a", "old"),
              IsStatus(absl::StatusCode::kNotFound,
                       "has expired; there are checkpoints 'c'"));
}

TEST_F(AdapterIoTest, BringsLayersOfAnotherShapeBack) {
  Save(Uneven());
  const auto loaded = io_.Load(load_).value();
  EXPECT_EQ(loaded.info.config, Uneven());
  const lora::AdapterState expected = StateOf(Uneven());
  EXPECT_EQ(loaded.state.weights, expected.weights);
  EXPECT_EQ(loaded.state.gradient, expected.gradient);
  EXPECT_EQ(loaded.state.moment1, expected.moment1);
  EXPECT_EQ(loaded.state.moment2, expected.moment2);
  EXPECT_EQ(loaded.state.optim_steps, 4u);
  EXPECT_EQ(loaded.state.optimizer, Optimizer::kMuon);
}

TEST_F(AdapterIoTest, DescribesWithoutReadingTensors) {
  Save(Uneven());
  const auto info = io_.Describe(load_).value();
  EXPECT_EQ(info.config, Uneven());
  EXPECT_EQ(info.last_step, 9u);
  EXPECT_THAT(io_.Describe({.source_adapter_id = "a", .name = "other"}),
              IsStatus(absl::StatusCode::kNotFound, "other"));
}

TEST_F(AdapterIoTest, ANameThatIsNotThereNamesSomeThatAre) {
  EXPECT_THAT(io_.Describe({.source_adapter_id = "a", .name = "x"}),
              IsStatus(absl::StatusCode::kNotFound, "\"x\" does not exist"));
  Save(Uneven());
  const char* const one = "\"x\" does not exist; there are checkpoints 'c'";
  EXPECT_THAT(io_.Describe({.source_adapter_id = "a", .name = "x"}),
              IsStatus(absl::StatusCode::kNotFound, one));
  EXPECT_THAT(io_.Load({.source_adapter_id = "a", .name = "x"}),
              IsStatus(absl::StatusCode::kNotFound, one));
  for (const char* name : {"c1", "c2", "c3", "c4", "c5", "c6"}) {
    std::filesystem::copy(folder_ / "a" / "c", folder_ / "a" / name,
                          std::filesystem::copy_options::recursive);
  }
  EXPECT_THAT(io_.Describe({.source_adapter_id = "a", .name = "x"}),
              IsStatus(absl::StatusCode::kNotFound,
                       "'c', 'c1', 'c2', 'c3', 'c4' and 2 more"));
}

TEST_F(AdapterIoTest, ListsNothingOfTheDaemonsOwnFolders) {
  Save({.rank = 2, .alpha = 3});
  std::filesystem::create_directories(folder_ / ".spill" / "0");
  ::testing::internal::CaptureStderr();
  const auto infos = io_.List("").value();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(infos.size(), 1u);
}

TEST_F(AdapterIoTest, ListsATenantWithoutReadingTheFoldersOfOthers) {
  ASSERT_THAT(SaveAs({.adapter_id = "alice~a", .name = "one"}), IsOk());
  ASSERT_THAT(SaveAs({.adapter_id = "alice~b", .name = "two"}), IsOk());
  ASSERT_THAT(SaveAs({.adapter_id = "bob~a", .name = "one"}), IsOk());
  std::ofstream(folder_ / "bob~a" / "one" / "MANIFEST.json") << "damaged";
  ::testing::internal::CaptureStderr();
  const auto infos = io_.List("alice~").value();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  ASSERT_EQ(infos.size(), 2u);
  EXPECT_EQ(infos[0].adapter_id, "alice~b");
  EXPECT_EQ(infos[1].adapter_id, "alice~a");
}

TEST_F(AdapterIoTest, AListingReadsAManifestOnce) {
  for (const char* const name : {"one", "two"}) {
    ASSERT_THAT(SaveAs({.adapter_id = "a", .name = name}), IsOk());
  }
  AdapterIo next(Disk(folder_), kBase);
  ASSERT_EQ(next.List("")->size(), 2u);
  const ScopedFailpoints counted("");
  ASSERT_EQ(next.List("")->size(), 2u);
  EXPECT_EQ(next.List("a")->front().name, "two");
  EXPECT_EQ(FailpointHits("files.read"), 0);
  ASSERT_THAT(io_.SetTtl({.adapter_id = "a", .name = "one", .ttl_seconds = 9}),
              IsOk());
  ASSERT_THAT(io_.Delete("a", "two"), IsOk());
  ASSERT_EQ(next.List("a")->size(), 1u);
  EXPECT_LT(next.List("a")->front().expires_at, absl::InfiniteFuture());
}

TEST_F(AdapterIoTest, AFolderThatIsALinkIsNoAdapters) {
  ASSERT_THAT(SaveAs({.adapter_id = "bob~a", .name = "one"}), IsOk());
  std::filesystem::create_directory_symlink(folder_ / "bob~a",
                                            folder_ / "alice~a");
  const auto is_not_found = IsStatus(absl::StatusCode::kNotFound, "one");
  EXPECT_THAT(io_.Load({.source_adapter_id = "alice~a", .name = "one"}),
              is_not_found);
  EXPECT_THAT(io_.Download("alice~a", "one"), is_not_found);
  EXPECT_THAT(io_.Delete("alice~a", "one"), is_not_found);
  EXPECT_FALSE(SaveAs({.adapter_id = "alice~a", .name = "two"}).ok());
  EXPECT_THAT(*io_.List("alice~"), ::testing::IsEmpty());
  EXPECT_THAT(*io_.List("alice~a"), ::testing::IsEmpty());
  EXPECT_THAT(io_.Download("bob~a", "one"), IsOk());
}

TEST_F(AdapterIoTest, FoldersAreTheOwnersOnly) {
  const mode_t before = ::umask(0);
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "one"}), IsOk());
  ::umask(before);
  EXPECT_EQ(std::filesystem::status(folder_ / "a").permissions(),
            std::filesystem::perms::owner_all);
}

TEST_F(AdapterIoTest, ReadsManifestsFromBeforeLayersCouldDiffer) {
  const LoraConfig even = {.rank = 2, .alpha = 3};
  Save(even);
  EditConfig([](json& config) { config.erase("overrides"); });
  const auto loaded = io_.Load(load_).value();
  EXPECT_EQ(loaded.info.config, even);
}

TEST_F(AdapterIoTest, RefusesADamagedManifest) {
  const std::vector<json> damaged = {
      "none",
      json::array({1}),
      {{{"layer", 0}, {"module", 0}, {"rank", 1}}},
      {{{"layer", 0},
        {"module", kAllTargetModules.size()},
        {"rank", 1},
        {"alpha", 1}}},
      {{{"layer", -1}, {"module", 0}, {"rank", 1}, {"alpha", 1}}},
      {{{"layer", 0}, {"module", 0}, {"rank", 1 << 20}, {"alpha", 1}}}};
  for (const json& overrides : damaged) {
    Save(Uneven());
    EditConfig([&](json& config) { config["overrides"] = overrides; });
    EXPECT_THAT(io_.Load(load_), IsStatus(kDataLoss, "manifest is damaged"))
        << overrides;
  }
}

// The weights' shapes come from adapter_config.json, and the moments' from the
// manifest. If they differed, a read could pass the end of a buffer.
TEST_F(AdapterIoTest, RefusesAManifestOfAnotherAdapter) {
  Save(Uneven());
  EditConfig([](json& config) { config["overrides"] = json::array(); });
  EXPECT_THAT(io_.Load(load_),
              IsStatus(kDataLoss, "adapter_config.json and manifest differ"));
}

TEST_F(AdapterIoTest, WeightsThatAreNotFiniteAreALossOfData) {
  AdapterCopy copy = CopyOf({.rank = 2, .alpha = 3});
  copy.state.weights[0] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_THAT(io_.Save({.adapter_id = "a", .name = "c"}, copy), IsOk());
  EXPECT_THAT(io_.Load(load_),
              IsStatus(kDataLoss, "checkpoint 'c': adapter_model.safetensors"));
}

TEST_F(AdapterIoTest, KeepsTheCheckpointsProperties) {
  const auto saved = SaveAs({.adapter_id = "a",
                             .name = "c",
                             .metadata = {{"loss", "0.5"}},
                             .ttl_seconds = 60});
  ASSERT_THAT(saved, IsOk());
  const auto list = io_.List("a").value();
  ASSERT_EQ(list.size(), 1u);
  const CheckpointInfo& info = list.front();
  EXPECT_EQ(info.kind, CheckpointKind::kTrain);
  EXPECT_EQ(info.metadata, (CheckpointMetadata{{"loss", "0.5"}}));
  EXPECT_EQ(info.expires_at - info.created_at, absl::Seconds(60));
  EXPECT_EQ(info.tenant, "t");
  EXPECT_EQ(info.base_model, "base");
  EXPECT_EQ(info.base_fingerprint, "0123456789abcdef");
}

TEST_F(AdapterIoTest, ASamplerCheckpointHasOnlyWeights) {
  const auto train = SaveAs({.adapter_id = "a", .name = "train"});
  const auto sampler = SaveAs(
      {.adapter_id = "a", .name = "sampler", .kind = CheckpointKind::kSampler});
  ASSERT_THAT(train, IsOk());
  ASSERT_THAT(sampler, IsOk());
  EXPECT_LT(sampler->size_bytes, train->size_bytes / 2);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a" / "sampler" /
                                       "optimizer.safetensors"));
  LoadCheckpointRequest load{.source_adapter_id = "a", .name = "sampler"};
  const auto refused = IsStatus(absl::StatusCode::kFailedPrecondition,
                                "checkpoint 'sampler' has kind sampler, which "
                                "has no optimizer state: load it with "
                                "weights_only");
  EXPECT_THAT(io_.Load(load), refused);
  EXPECT_THAT(io_.Describe(load), refused);
  load.weights_only = true;
  const auto loaded = io_.Load(load).value();
  EXPECT_EQ(loaded.state.weights, StateOf({.rank = 2, .alpha = 3}).weights);
  EXPECT_TRUE(loaded.state.moment1.empty());
  EXPECT_EQ(loaded.info.last_step, 0u);
}

TEST_F(AdapterIoTest, RefusesTheCheckpointOfAnotherBaseModel) {
  Save(Uneven());
  lora::BaseModel other = kBase;
  other.name = "finetuned";
  other.fingerprint = "fedcba9876543210";
  const AdapterIo server(Disk(folder_), other);
  EXPECT_THAT(server.Load(load_),
              IsStatus(absl::StatusCode::kFailedPrecondition,
                       "the checkpoint belongs to base model 'base' "
                       "(fingerprint 0123456789ab), the server has "
                       "'finetuned' (fingerprint fedcba987654): it has the "
                       "fingerprint of an older server, which does not say "
                       "what differs. A server with "
                       "--accept-base-model-change takes it"));
  other.accepts_change = true;
  const auto loaded = AdapterIo(Disk(folder_), other).Load(load_).value();
  EXPECT_EQ(loaded.state.moment2, StateOf(Uneven()).moment2);
}

TEST_F(AdapterIoTest, ReadsManifestsFromBeforeTheProperties) {
  Save(Uneven());
  const auto make_old = [](json& fields) {
    for (const char* field : {"kind", "metadata", "tenant", "base_model_name",
                              "base_fingerprint"}) {
      EXPECT_EQ(fields.erase(field), 1u) << field;
    }
  };
  EditFields("c", make_old);
  lora::BaseModel other = kBase;
  other.fingerprint = "fedcba9876543210";
  const auto loaded = AdapterIo(Disk(folder_), other).Load(load_).value();
  EXPECT_EQ(loaded.info.kind, CheckpointKind::kTrain);
  EXPECT_EQ(loaded.info.expires_at, absl::InfiniteFuture());
  EXPECT_EQ(loaded.state.moment2, StateOf(Uneven()).moment2);
  // A base model of another shape is still refused.
  other.shape.ffn = 9;
  EXPECT_THAT(AdapterIo(Disk(folder_), other).Load(load_),
              IsStatus(absl::StatusCode::kFailedPrecondition, "another shape"));
}

TEST_F(AdapterIoTest, RefusesDamagedProperties) {
  const json long_text = std::string(kMaxMetadataBytes, 'x');
  json many = json::object();
  for (size_t i = 0; i <= kMaxMetadataEntries; ++i) {
    many[absl::StrCat("k", i)] = "";
  }
  const std::vector<std::pair<const char*, json>> damaged = {
      {"kind", "other"},
      {"kind", 1},
      {"optimizer", "sgd"},
      {"optimizer", 1},
      {"metadata", "text"},
      {"metadata", {{"k", 1}}},
      {"metadata", {{"../k", "v"}}},
      {"metadata", {{"k", long_text}}},
      {"metadata", many},
      {"ttl_seconds", -1},
      {"ttl_seconds", lora::kMaxStoredTtlSeconds + 1},
      {"ttl_from", -1},
      {"created_at", 1e300},
      {"created_at", -1},
      {"last_step", uint64_t{1} << 63},
      {"optim_steps", uint64_t{1} << 63},
      {"tenant", 1}};
  for (const auto& [field, value] : damaged) {
    Save(Uneven());
    EditFields("c", [&](json& fields) { fields[field] = value; });
    EXPECT_THAT(io_.Load(load_), IsStatus(kDataLoss, "manifest is damaged"))
        << field << " " << value.dump().substr(0, 80);
  }
}

// Makes a checkpoint look as if it was saved long ago.
constexpr auto kLongAgo = [](json& fields) { fields["created_at"] = 1e9; };

TEST_F(AdapterIoTest, AnExpiredCheckpointIsNotThere) {
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "kept"}), IsOk());
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "over", .ttl_seconds = 60}),
              IsOk());
  EXPECT_THAT(Names(), ::testing::UnorderedElementsAre("kept", "over"));
  EditFields("over", kLongAgo);
  EditFields("kept", kLongAgo);
  EXPECT_THAT(Names(), ::testing::ElementsAre("kept"));
  const LoadCheckpointRequest load{.source_adapter_id = "a", .name = "over"};
  const auto gone =
      IsStatus(absl::StatusCode::kNotFound,
               "\"over\" has expired; there are checkpoints 'kept'");
  EXPECT_THAT(io_.Load(load), gone);
  EXPECT_THAT(io_.Describe(load), gone);
  // A new checkpoint can take the name of an expired one.
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "over"}), IsOk());
  EXPECT_THAT(io_.Load(load), IsOk());
}

TEST_F(AdapterIoTest, DeletesWhatHasExpired) {
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "kept"}), IsOk());
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "later", .ttl_seconds = 60}),
              IsOk());
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "over", .ttl_seconds = 60}),
              IsOk());
  EditFields("over", kLongAgo);
  AdapterIo(Disk(folder_), kBase).DeleteExpired();
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a" / "over"));
  EXPECT_THAT(Names(), ::testing::UnorderedElementsAre("kept", "later"));
  // DeleteExpired does nothing before the earliest expiry. A new checkpoint can
  // make this time earlier.
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "soon", .ttl_seconds = 1}),
              IsOk());
  absl::SleepFor(absl::Milliseconds(1100));
  io_.DeleteExpired();
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a" / "soon"));
}

TEST_F(AdapterIoTest, ATimeToLiveIsSetAnew) {
  Save(Uneven());
  const absl::Time before = absl::Now();
  const auto set =
      io_.SetTtl(
             {.adapter_id = "a", .name = "c", .ttl_seconds = kMaxTtlSeconds})
          .value();
  EXPECT_EQ(set.name, "c");
  const absl::Duration most =
      absl::Seconds(static_cast<int64_t>(kMaxTtlSeconds));
  EXPECT_GE(set.expires_at, before + most);
  // The manifest has whole seconds, and doubles of the time have microseconds.
  EXPECT_LE(set.expires_at, absl::Now() + most + absl::Seconds(1));
  AdapterIo next(Disk(folder_), kBase);
  EXPECT_LT(
      absl::AbsDuration(next.List("a")->front().expires_at - set.expires_at),
      absl::Microseconds(1));
  EXPECT_THAT(io_.Load(load_), IsOk());
  const auto never = io_.SetTtl({.adapter_id = "a", .name = "c"}).value();
  EXPECT_EQ(never.expires_at, absl::InfiniteFuture());
  EXPECT_EQ(next.List("a")->front().expires_at, absl::InfiniteFuture());
  // The time counts from now, also on the longest-lived checkpoint. A server
  // with another base model changes nothing else.
  EditFields("c", kLongAgo);
  const lora::BaseModel other = {
      .name = "other", .fingerprint = "fe", .shape = {.num_layers = 9}};
  const auto old =
      AdapterIo(Disk(folder_), other)
          .SetTtl(
              {.adapter_id = "a", .name = "c", .ttl_seconds = kMaxTtlSeconds})
          .value();
  EXPECT_GE(old.expires_at, before + most);
  EXPECT_THAT(io_.Load(load_), IsOk());
}

TEST_F(AdapterIoTest, ATimeToLiveThatWasSetEndsTheCheckpoint) {
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "c"}), IsOk());
  io_.DeleteExpired();
  const auto set =
      io_.SetTtl({.adapter_id = "a", .name = "c", .ttl_seconds = 1}).value();
  absl::SleepFor(set.expires_at - absl::Now() + absl::Milliseconds(100));
  EXPECT_THAT(io_.SetTtl({.adapter_id = "a", .name = "c"}),
              IsStatus(absl::StatusCode::kNotFound, "\"c\" has expired"));
  io_.DeleteExpired();
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a"));
  EXPECT_THAT(io_.SetTtl({.adapter_id = "a", .name = "c"}),
              IsStatus(absl::StatusCode::kNotFound, "c"));
}

TEST_F(AdapterIoTest, ARepeatedSaveIsKnownByAllItsProperties) {
  const SaveCheckpointRequest first{.adapter_id = "a",
                                    .name = "c",
                                    .metadata = {{"k", "v"}},
                                    .ttl_seconds = 60};
  const auto saved = SaveAs(first).value();
  const auto again = SaveAs(first).value();
  EXPECT_LT(absl::AbsDuration(again.created_at - saved.created_at),
            absl::Microseconds(1));
  std::vector<SaveCheckpointRequest> others(3, first);
  others[0].kind = CheckpointKind::kSampler;
  others[1].metadata["k"] = "w";
  others[2].ttl_seconds = 61;
  for (const SaveCheckpointRequest& other : others) {
    EXPECT_THAT(SaveAs(other), IsStatus(absl::StatusCode::kAlreadyExists, "c"));
  }
  SaveCheckpointRequest sampler = others[0];
  sampler.name = "s";
  ASSERT_THAT(SaveAs(sampler), IsOk());
  EXPECT_THAT(SaveAs(sampler), IsOk());
}

TEST_F(AdapterIoTest, ASaveLeavesTheReserveOfTheDisk) {
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "c"}), IsOk());
  AdapterIo full(Disk(folder_, uint64_t{1} << 62), kBase);
  const AdapterCopy copy = CopyOf({.rank = 2, .alpha = 3});
  const auto refused = full.Save({.adapter_id = "a", .name = "d"}, copy);
  EXPECT_THAT(refused, IsStatus(absl::StatusCode::kResourceExhausted,
                                "--disk-reserve-bytes is 4611686018427387904"));
  EXPECT_EQ(FindReason(refused.status())->name, "CHECKPOINT_DISK_FULL");
  // A repeated save of a stored checkpoint needs no disk space.
  EXPECT_THAT(full.Save({.adapter_id = "a", .name = "c"}, copy), IsOk());
  EXPECT_THAT(full.Delete("a", "c"), IsOk());
  EXPECT_THAT(Names(), ::testing::IsEmpty());
}

TEST_F(AdapterIoTest, KnowsTheBytesOfAllCheckpoints) {
  const auto listed = [this] {
    uint64_t bytes = 0;
    const auto infos = io_.List("").value();
    for (const CheckpointInfo& info : infos) bytes += info.size_bytes;
    return bytes;
  };
  io_.DeleteExpired();
  EXPECT_EQ(io_.stored_bytes(), 0);
  const auto first = SaveAs({.adapter_id = "a", .name = "c1"}).value();
  EXPECT_EQ(io_.stored_bytes(), first.size_bytes);
  // A smaller checkpoint replaces a larger one.
  ASSERT_THAT(SaveAs({.adapter_id = "a",
                      .name = "c1",
                      .overwrite = true,
                      .kind = CheckpointKind::kSampler}),
              IsOk());
  EXPECT_LT(io_.stored_bytes(), first.size_bytes);
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "c2"}), IsOk());
  ASSERT_THAT(SaveAs({.adapter_id = "b", .name = "c2"}), IsOk());
  ASSERT_THAT(
      io_.Upload({.adapter_id = "d", .name = "up", .files = Downloaded("c2")}),
      IsOk());
  EXPECT_EQ(io_.stored_bytes(), listed());
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "c3", .keep_newest = 1}),
              IsOk());
  EXPECT_THAT(io_.Delete("d", "up"), IsOk());
  EXPECT_EQ(io_.stored_bytes(), listed());
  // The next process deletes the expired checkpoint, and counts the others.
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "over", .ttl_seconds = 60}),
              IsOk());
  EditFields("over", kLongAgo);
  AdapterIo next(Disk(folder_), kBase);
  next.DeleteExpired();
  EXPECT_EQ(next.stored_bytes(), listed());
  EXPECT_GT(next.stored_bytes(), 0);
}

TEST_F(AdapterIoTest, AFolderEndsWithItsLastCheckpoint) {
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "one"}), IsOk());
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "two"}), IsOk());
  EXPECT_THAT(io_.Delete("a", "one"), IsOk());
  EXPECT_TRUE(std::filesystem::exists(folder_ / "a" / "two"));
  EXPECT_THAT(io_.Delete("a", "two"), IsOk());
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a"));
  EXPECT_THAT(io_.Delete("a", "two"),
              IsStatus(absl::StatusCode::kNotFound, ""));
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "three"}), IsOk());
  EXPECT_THAT(Names(), ::testing::ElementsAre("three"));
  // A save that fails leaves no folder either.
  AdapterIo reserved(Disk(folder_, std::numeric_limits<int64_t>::max()), kBase);
  EXPECT_THAT(reserved.Save({.adapter_id = "b", .name = "c"}, CopyOf(Uneven())),
              IsStatus(absl::StatusCode::kResourceExhausted, "disk"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "b"));
}

TEST_F(AdapterIoTest, KeepsTheNewestOfAKind) {
  for (const char* name : {"c1", "c2", "c3"}) {
    ASSERT_THAT(SaveAs({.adapter_id = "a", .name = name}), IsOk());
  }
  ASSERT_THAT(
      SaveAs(
          {.adapter_id = "a", .name = "s1", .kind = CheckpointKind::kSampler}),
      IsOk());
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "c4", .keep_newest = 2}),
              IsOk());
  EXPECT_THAT(Names(), ::testing::ElementsAre("c4", "s1", "c3"));
  // The new checkpoint stays, even if another one has a later creation time.
  EditFields("c3", [](json& fields) { fields["created_at"] = 9e9; });
  ASSERT_THAT(SaveAs({.adapter_id = "a", .name = "c5", .keep_newest = 1}),
              IsOk());
  EXPECT_THAT(Names(), ::testing::ElementsAre("c5", "s1"));
}

TEST_F(AdapterIoTest, ACheckpointIsTheNewestAlsoIfTheClockWasSetBack) {
  for (const char* name : {"c1", "c2", "c3"}) {
    ASSERT_THAT(SaveAs({.adapter_id = "a", .name = name}), IsOk());
  }
  const double ahead =
      absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()) + 3600;
  EditFields("c3", [ahead](json& fields) { fields["created_at"] = ahead; });
  AdapterIo next(Disk(folder_), kBase);
  for (const char* name : {"c4", "c5"}) {
    ASSERT_THAT(next.Save({.adapter_id = "a", .name = name, .keep_newest = 3},
                          CopyOf({.rank = 2, .alpha = 3})),
                IsOk());
  }
  EXPECT_THAT(Names(), ::testing::ElementsAre("c5", "c4", "c3"));
}

TEST_F(AdapterIoTest, ATimeToLiveCountsFromNowAlsoIfTheClockWasSetBack) {
  Save(Uneven());
  const double ahead =
      absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()) + 3600;
  EditFields("c", [ahead](json& fields) { fields["created_at"] = ahead; });
  AdapterIo next(Disk(folder_), kBase);
  for (int i = 0; i < 2; ++i) {  // The second save is known as the first.
    const auto saved =
        next.Save({.adapter_id = "a", .name = "brief", .ttl_seconds = 60},
                  CopyOf({.rank = 2, .alpha = 3}))
            .value();
    EXPECT_GT(saved.created_at, absl::Now() + absl::Minutes(59));
    EXPECT_LE(saved.expires_at, absl::Now() + absl::Seconds(60));
  }
  for (const char* name : {"brief", "c"}) {
    const auto set =
        next.SetTtl({.adapter_id = "a", .name = name, .ttl_seconds = 9});
    EXPECT_LE(set->expires_at, absl::Now() + absl::Seconds(10));
  }
  const auto infos = AdapterIo(Disk(folder_), kBase).List("a").value();
  for (const CheckpointInfo& info : infos) {
    EXPECT_LE(info.expires_at, absl::Now() + absl::Seconds(10)) << info.name;
  }
}

// Checkpoints in a store.
class StoredAdapterIoTest : public AdapterIoTest {
 protected:
  AdapterIo Io() {
    return {std::make_unique<checkpoint::ObjectCheckpoints>(
                &store_, 0, 1, [] { return absl::OkStatus(); }),
            kBase, absl::ZeroDuration()};
  }
  static absl::Status Save(AdapterIo& io, const SaveCheckpointRequest& save) {
    return io.Save(save, CopyOf({.rank = 2, .alpha = 3})).status();
  }
  // Counts the objects that are read from now on.
  void CountReads() {
    reads_ = 0;
    objects_.before = [this](const std::string& operation, const std::string&) {
      if (operation == "get") ++reads_;
    };
  }

  store::MemoryObjects objects_;
  store::MemoryStore store_{&objects_};
  std::atomic<int> reads_ = 0;
};

TEST_F(StoredAdapterIoTest, AStoreThatIsAwayIsNoEmptyList) {
  AdapterIo io = Io();
  ASSERT_THAT(Save(io, {.adapter_id = "a", .name = "c"}), IsOk());
  AdapterIo next = Io();
  objects_.list_error = absl::UnavailableError("away");
  for (AdapterIo* one : {&io, &next}) {
    const absl::Status refused = one->List("a").status();
    EXPECT_EQ(FindReason(refused)->name, checkpoint::kStoreUnreachable);
    // A creation that may be before another one's is not given.
    EXPECT_EQ(FindReason(Save(*one, {.adapter_id = "a", .name = "d"}))->name,
              checkpoint::kStoreUnreachable);
  }
  EXPECT_GT(io.stored_bytes(), 0);  // What is known stays known.
  // Neither is a manifest that cannot be read a damaged one.
  objects_.list_error = absl::OkStatus();
  objects_.read_error = absl::UnavailableError("away");
  EXPECT_EQ(FindReason(next.List("a").status())->name,
            checkpoint::kStoreUnreachable);
  objects_.read_error = absl::OkStatus();
  EXPECT_EQ(next.List("a")->size(), 1u);
  objects_.objects["checkpoints/a/c"] = {.bytes = "{}", .etag = "damaged"};
  EXPECT_EQ(next.List("a")->size(), 0u);
}

TEST_F(StoredAdapterIoTest, AnExpiryIsLookedForAgainWhenTheStoreIsBack) {
  AdapterIo io = Io();
  ASSERT_THAT(Save(io, {.adapter_id = "a", .name = "c", .ttl_seconds = 1}),
              IsOk());
  absl::SleepFor(absl::Milliseconds(1100));
  AdapterIo next = Io();
  objects_.list_error = absl::UnavailableError("away");
  next.DeleteExpired();
  objects_.list_error = absl::OkStatus();
  objects_.read_error = absl::UnavailableError("away");
  next.DeleteExpired();
  objects_.read_error = absl::OkStatus();
  next.DeleteExpired();
  EXPECT_THAT(objects_.objects, ::testing::IsEmpty());
}

TEST_F(StoredAdapterIoTest, TheLookForExpiriesComesInSlices) {
  AdapterIo io = Io();
  for (int i = 0; i < 130; ++i) {
    ASSERT_THAT(Save(io, {.adapter_id = absl::StrCat("a", i), .name = "c"}),
                IsOk());
  }
  AdapterIo next = Io();
  for (const int reads : {128, 2, 0}) {
    CountReads();
    next.DeleteExpired();
    EXPECT_EQ(reads_, reads);
  }
  EXPECT_EQ(next.stored_bytes(), io.stored_bytes());
}

TEST_F(StoredAdapterIoTest, ADownloadReadsOnlyWhatIsAskedFor) {
  AdapterIo io = Io();
  ASSERT_THAT(Save(io, {.adapter_id = "a", .name = "c"}), IsOk());
  CountReads();
  const auto files = io.Download("a", "c").value();
  EXPECT_EQ(reads_, 1);  // The manifest.
  ASSERT_EQ(files.front().name(), "adapter_config.json");
  EXPECT_THAT(files.front().Read(0, files.front().size()), IsOk());
  EXPECT_EQ(reads_, 2);
}

}  // namespace
}  // namespace weft::engine::adapter_io_test
