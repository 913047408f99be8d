#include "src/weights/tensor_reader.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/weights/files.h"

namespace weft::weights {
namespace {

using ::testing::HasSubstr;

struct Named {
  std::string name;
  at::Tensor values;
  ScalarType dtype;
};

// Opens a checkpoint of these tensors; `padding` shifts their alignment.
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
  auto checkpoint = Checkpoint::Open(folder.path());
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return *std::move(checkpoint);
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

TEST(ReadTensor, CopiesMatricesOfManyBlocks) {
  const TempFolder folder;
  const at::Tensor source = at::randn({3001, 1001});
  const auto checkpoint = Store(folder, {{"w", source, ScalarType::kF32}});
  const at::Tensor destination = at::zeros({3001, 1001});
  ASSERT_TRUE(ReadTensor(*checkpoint, "w", destination).ok());
  EXPECT_TRUE(at::equal(destination, source));
}

TEST(ReadTensor, ReadsVectorsScalarsAndNothing) {
  const TempFolder folder;
  const at::Tensor vector = at::randn({7});
  const at::Tensor scalar = at::randn({});
  const at::Tensor none = at::empty({0, 4});
  const auto checkpoint = Store(folder, {{"v", vector, ScalarType::kF32},
                                         {"s", scalar, ScalarType::kF32},
                                         {"n", none, ScalarType::kF32}});
  const at::Tensor v = at::zeros({7});
  const at::Tensor s = at::zeros({});
  EXPECT_TRUE(ReadTensor(*checkpoint, "v", v).ok());
  EXPECT_TRUE(ReadTensor(*checkpoint, "s", s).ok());
  EXPECT_TRUE(ReadTensor(*checkpoint, "n", at::zeros({0, 4})).ok());
  EXPECT_TRUE(at::equal(v, vector));
  EXPECT_TRUE(at::equal(s, scalar));
}

TEST(ReadTensor, RefusesOtherShapesTypesAndNames) {
  const TempFolder folder;
  const auto checkpoint =
      Store(folder, {{"w", at::zeros({2, 3}), ScalarType::kF32},
                     {"i", at::zeros({2}, at::kInt), ScalarType::kI32}});
  const absl::Status shape = ReadTensor(*checkpoint, "w", at::zeros({3, 2}));
  EXPECT_EQ(shape.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(shape.message()),
              HasSubstr("'w' has shape [2, 3]; expected [3, 2]"));
  const absl::Status dtype = ReadTensor(*checkpoint, "i", at::zeros({2}));
  EXPECT_EQ(dtype.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(dtype.message()), HasSubstr("I32"));
  EXPECT_EQ(ReadTensor(*checkpoint, "none", at::zeros({2})).code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace weft::weights
