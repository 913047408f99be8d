#include "src/weights/tensor_reader.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/weights/safetensors.h"
#include "tests/support/status_matchers.h"
#include "tests/weights/files.h"

namespace weft::weights {
namespace {

using ::testing::HasSubstr;

struct Named {
  std::string name;
  at::Tensor values;
  ScalarType dtype;
};

// Opens a checkpoint of these tensors. `padding` shifts their alignment.
std::unique_ptr<Checkpoint> Store(const TempFolder& folder,
                                  const std::vector<Named>& tensors,
                                  size_t padding = 0) {
  std::vector<NamedTensor> list;
  for (const Named& tensor : tensors) {
    const auto sizes = tensor.values.sizes();
    list.push_back(
        {tensor.name,
         {.dtype = tensor.dtype,
          .shape = sizes.vec(),
          .bytes = absl::MakeConstSpan(
              static_cast<const std::byte*>(tensor.values.const_data_ptr()),
              tensor.values.nbytes())}});
  }
  std::string file = WriteSafetensors(list);
  const size_t header_bytes = static_cast<unsigned char>(file[0]) +
                              256 * static_cast<unsigned char>(file[1]);
  const std::string padded =
      file.substr(8, header_bytes) + std::string(padding, ' ');
  (void)folder.Write("model.safetensors",
                     RawFile(padded, 0) + file.substr(8 + header_bytes));
  return Checkpoint::Open(folder.path()).value();
}

// Reads one tensor by a plan.
absl::Status ReadTensor(const Checkpoint& checkpoint, std::string_view name,
                        const at::Tensor& destination) {
  ReadPlan plan(checkpoint);
  WEFT_RETURN_IF_ERROR(plan.Add(name, {}, destination));
  return plan.Run([](int64_t /*bytes*/) {});
}

TEST(ReadTensor, ConvertsFromAndToEveryFloatingType) {
  at::manual_seed(1);
  const std::pair<ScalarType, at::ScalarType> sources[] = {
      {ScalarType::kF32, at::kFloat},
      {ScalarType::kF16, at::kHalf},
      {ScalarType::kBf16, at::kBFloat16}};
  for (const auto& [dtype, source_dtype] : sources) {
    for (const size_t padding : {0, 1}) {
      const at::Tensor source = at::randn({5, 3}).to(source_dtype);
      const TempFolder folder;
      const auto checkpoint = Store(folder, {{"w", source, dtype}}, padding);
      for (const at::ScalarType target :
           {at::kFloat, at::kHalf, at::kBFloat16}) {
        const at::Tensor destination = at::zeros({5, 3}, target);
        ASSERT_TRUE(ReadTensor(*checkpoint, "w", destination).ok());
        EXPECT_TRUE(at::equal(destination, source.to(target)));
      }
    }
  }
}

TEST(ReadTensor, FillsOnlyItsRowsOfAFusedMatrix) {
  const TempFolder folder;
  const at::Tensor source = at::arange(8, at::kFloat).reshape({2, 4});
  const auto checkpoint = Store(folder, {{"w", source, ScalarType::kF32}});
  const at::Tensor fused = at::full({4, 4}, -1.0f);
  ASSERT_TRUE(ReadTensor(*checkpoint, "w", fused.narrow(0, 1, 2)).ok());
  EXPECT_TRUE(at::equal(fused.narrow(0, 1, 2), source));
  EXPECT_TRUE(at::equal(fused[0], at::full({4}, -1.0f)));
  EXPECT_TRUE(at::equal(fused[3], at::full({4}, -1.0f)));
}

absl::Status ReadSlice(const Checkpoint& checkpoint, const SliceBegin& begin,
                       const at::Tensor& destination) {
  ReadPlan plan(checkpoint);
  const absl::Status added = plan.Add("w", begin, destination);
  if (!added.ok()) return added;
  return plan.Run([](int64_t /*bytes*/) {});
}

TEST(ReadPlan, ReadsASliceAndNothingBesideIt) {
  const TempFolder folder;
  const at::Tensor source = at::randn({9, 5});
  const auto checkpoint = Store(folder, {{"w", source, ScalarType::kF32}});
  struct Case {
    SliceBegin begin;
    std::vector<int64_t> shape;
  };
  const Case cases[] = {
      {{4, 0}, {3, 5}}, {{0, 2}, {9, 3}}, {{3, 1}, {4, 2}}, {{8, 4}, {1, 1}}};
  for (const auto& [begin, shape] : cases) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const uint64_t before = checkpoint->bytes_read();
      const at::Tensor slice = at::zeros(shape, dtype);
      ASSERT_THAT(ReadSlice(*checkpoint, begin, slice), IsOk());
      EXPECT_TRUE(at::equal(slice, source.narrow(0, begin.row, shape[0])
                                       .narrow(1, begin.column, shape[1])
                                       .to(dtype)));
      EXPECT_EQ(checkpoint->bytes_read() - before,
                shape[0] * shape[1] * sizeof(float));
    }
  }
}

TEST(ReadPlan, RefusesSlicesThatAreNotThere) {
  const TempFolder folder;
  const auto checkpoint =
      Store(folder, {{"w", at::zeros({9, 5}), ScalarType::kF32}});
  const std::pair<SliceBegin, std::vector<int64_t>> cases[] = {
      {{7, 0}, {3, 5}}, {{-1, 0}, {3, 5}},  {{10, 0}, {1, 5}},
      {{0, 3}, {9, 3}}, {{0, -1}, {9, 3}},  {{0, 0}, {9}},
      {{0, 0}, {}},     {{0, 0}, {9, 5, 1}}};
  for (const auto& [begin, shape] : cases) {
    const absl::Status status = ReadSlice(*checkpoint, begin, at::zeros(shape));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("'w' has shape [9, 5]; wanted is a slice from row"));
  }
}

TEST(ReadPlan, ReadsManyTensorsAndCountsTheirBytes) {
  const TempFolder folder;
  std::vector<Named> tensors;
  std::vector<at::Tensor> destinations;
  for (int i = 0; i < 40; ++i) {
    tensors.push_back(
        {"t" + std::to_string(i), at::randn({i, 1000 * i}), ScalarType::kF32});
  }
  const auto checkpoint = Store(folder, tensors);
  ReadPlan plan(*checkpoint);
  const uint64_t before = checkpoint->bytes_read();
  for (const Named& tensor : tensors) {
    destinations.push_back(at::zeros_like(tensor.values));
    ASSERT_THAT(plan.Add(tensor.name, {}, destinations.back()), IsOk());
  }
  std::atomic<uint64_t> heard = 0;
  ASSERT_THAT(plan.Run([&](int64_t bytes) { heard += bytes; }), IsOk());
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(at::equal(destinations[i], tensors[i].values)) << i;
  }
  EXPECT_EQ(heard, plan.num_bytes());
  EXPECT_EQ(checkpoint->bytes_read() - before, plan.num_bytes());
}

TEST(HasValues, ComparesWhatAPlanWouldWrite) {
  const TempFolder folder;
  at::Tensor source = at::randn({3001, 1001});
  source[5][5] = NAN;
  const auto checkpoint = Store(folder, {{"w", source, ScalarType::kF32}});
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor same = source.to(dtype).clone();
    EXPECT_THAT(HasValues(*checkpoint, "w", {}, same), IsOkAndHolds(true));
    same[3000][1000] += 1;
    EXPECT_THAT(HasValues(*checkpoint, "w", {}, same), IsOkAndHolds(false));
    const at::Tensor slice = source.to(dtype).slice(0, 4, 9).slice(1, 2, 30);
    EXPECT_THAT(HasValues(*checkpoint, "w", {4, 2}, slice), IsOkAndHolds(true));
    EXPECT_THAT(HasValues(*checkpoint, "w", {4, 3}, slice),
                IsOkAndHolds(false));
  }
  EXPECT_EQ(
      HasValues(*checkpoint, "w", {3000, 0}, at::zeros({2, 2})).status().code(),
      absl::StatusCode::kInvalidArgument);
}

TEST(ReadTensor, SaysSoWhenTheFileWasCutShort) {
  const TempFolder folder;
  const auto checkpoint =
      Store(folder, {{"w", at::zeros({3001, 1001}), ScalarType::kF32}});
  std::filesystem::resize_file(folder.path() + "/model.safetensors", 6'000'000);
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
    const absl::Status status =
        ReadTensor(*checkpoint, "w", at::zeros({3001, 1001}, dtype));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), HasSubstr("tensor 'w': ended"));
  }
}

TEST(ReadTensor, CopiesMatricesOfManyBlocks) {
  const TempFolder folder;
  const at::Tensor source = at::randn({3001, 1001});
  const auto checkpoint = Store(folder, {{"w", source, ScalarType::kF32}});
  const at::Tensor destination = at::zeros({3001, 1001});
  ASSERT_TRUE(ReadTensor(*checkpoint, "w", destination).ok());
  EXPECT_TRUE(at::equal(destination, source));
}

TEST(ReadTensor, ReadsVectorsAndNothing) {
  const TempFolder folder;
  const at::Tensor vector = at::randn({7});
  const at::Tensor none = at::empty({0, 4});
  const auto checkpoint = Store(
      folder, {{"v", vector, ScalarType::kF32}, {"n", none, ScalarType::kF32}});
  const at::Tensor v = at::zeros({7});
  EXPECT_TRUE(ReadTensor(*checkpoint, "v", v).ok());
  EXPECT_TRUE(ReadTensor(*checkpoint, "n", at::zeros({0, 4})).ok());
  EXPECT_TRUE(at::equal(v, vector));
}

TEST(ReadTensor, RefusesOtherShapesTypesAndNames) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const auto f32 = [](at::IntArrayRef shape) { return at::zeros(shape); };
  const TempFolder folder;
  const auto checkpoint = Store(
      folder, {{"transposed", f32({3, 2}), ScalarType::kF32},
               {"flat", f32({6}), ScalarType::kF32},
               {"scalar", f32({}), ScalarType::kF32},
               {"empty", f32({0, 3}), ScalarType::kF32},
               {"int", at::zeros({2, 3}, at::kInt), ScalarType::kI32},
               {"bytes", at::zeros({2, 3}, at::kByte), ScalarType::kU8},
               {"double", at::zeros({2, 3}, at::kDouble), ScalarType::kF64}});
  const struct {
    const char* name;
    absl::StatusCode code;
    const char* message;
  } refusals[] = {
      {"transposed", kInvalid, "has shape [3, 2]; wanted is a slice"},
      {"flat", kInvalid, "has shape [6]; wanted is a slice"},
      {"scalar", kInvalid, "has shape []; wanted is a slice"},
      {"empty", kInvalid, "has shape [0, 3]; wanted is a slice"},
      {"int", kInvalid, "has dtype I32; F32, F16 or BF16 is expected"},
      {"bytes", kInvalid, "has dtype U8; F32, F16 or BF16 is expected"},
      {"double", kInvalid, "has dtype F64; F32, F16 or BF16 is expected"},
      {"none", absl::StatusCode::kNotFound, "is not in the checkpoint"}};
  for (const auto& [name, code, message] : refusals) {
    const absl::Status status = ReadTensor(*checkpoint, name, f32({2, 3}));
    EXPECT_EQ(status.code(), code) << name;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("tensor '", name, "' ", message)));
  }
}

}  // namespace
}  // namespace weft::weights
