#include "src/lora/lora_cuda.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "kernels/cuda/lora_few_rows.h"
#include "kernels/cuda/lora_gradient.h"
#include "kernels/cuda/lora_product.h"

namespace weft::lora::cuda {
namespace {

namespace k = kernels::cuda;

void Check(cudaError_t status, const char* what) {
  TORCH_CHECK(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

at::Tensor Workspace(int64_t num_floats, const at::Tensor& like) {
  return at::empty({num_floats}, like.options().dtype(at::kFloat));
}

// Returns `product` with these tensors as its operands. The tensors are 2-D,
// and the elements of a row are adjacent.
k::LoraProduct On(const at::Tensor& features_TF, const at::Tensor& shrunk_TR,
                  k::LoraProduct product) {
  product.features_TF = features_TF.data_ptr();
  product.features_stride = features_TF.stride(0);
  product.shrunk_TR = shrunk_TR.data_ptr();
  product.shrunk_stride = shrunk_TR.stride(0);
  return product;
}

void RunShrink(k::LoraProduct product, const at::Tensor& shrunk_TR,
               CUstream_st* stream) {
  const at::Tensor workspace =
      Workspace(LoraShrinkWorkspace(product), shrunk_TR);
  product.workspace = workspace.mutable_data_ptr<float>();
  Check(RunLoraShrink(product, stream), "product of the adapters");
}

void RunGradient(k::LoraProduct product, const at::Tensor& shrunk_TR,
                 CUstream_st* stream) {
  const at::Tensor workspace =
      Workspace(LoraGradientWorkspace(product), shrunk_TR);
  product.workspace = workspace.mutable_data_ptr<float>();
  Check(AddLoraGradient(product, stream), "gradient of the adapters");
}

// Returns the arguments of a site's products for segments of few rows. If y_TO
// or s_TR is undefined, its address in the result is null.
k::LoraFewRowsProduct OfFewRows(const at::Tensor& x_TI, const at::Tensor& y_TO,
                                const at::Tensor& s_TR,
                                const k::LoraProduct& of_a,
                                const k::LoraProduct& of_b) {
  k::LoraFewRowsProduct product = {.table = of_a.table,
                                   .slot_of_a = of_a.projections[0].slot,
                                   .max_rank = of_a.max_rank,
                                   .num_projections = of_b.num_projections,
                                   .max_projection_rank = of_b.max_rank,
                                   .x_TI = x_TI.const_data_ptr(),
                                   .x_stride = x_TI.stride(0),
                                   .inputs = of_a.projections[0].features};
  std::ranges::copy(of_b.projections, product.projections);
  if (y_TO.defined()) {
    product.y_TO = y_TO.data_ptr();
    product.y_stride = y_TO.stride(0);
  }
  if (s_TR.defined()) {
    product.shrunk_TR = s_TR.data_ptr();
    product.shrunk_stride = s_TR.stride(0);
  }
  return product;
}

// Computes x A^T for the segments of few rows. Then calls `then`, a launch that
// uses x A^T.
void RunFewRows(k::LoraFewRowsProduct product, const at::Tensor& x_TI,
                cudaError_t (*then)(const k::LoraFewRowsProduct&, cudaStream_t),
                CUstream_st* stream) {
  if (product.table.max_few == 0) return;
  const at::Tensor workspace = Workspace(LoraFewRowsWorkspace(product), x_TI);
  product.workspace = workspace.mutable_data_ptr<float>();
  Check(RunLoraFewRowsShrink(product, stream), "product of the adapters");
  Check(then(product, stream), "product of the adapters");
}

// Allocates S for all rows.
at::Tensor EmptyShrunk(const at::Tensor& x_TI, const k::LoraProduct& of_a) {
  return at::empty({x_TI.size(0), of_a.max_rank}, x_TI.options());
}

// Limits the product to the segments that the few-rows kernels do not compute.
k::LoraProduct LongSegments(k::LoraProduct product) {
  product.table = product.table.LongSegments();
  return product;
}

void CheckRows(const at::Tensor& rows_T, const RoutingTable& table) {
  TORCH_CHECK(rows_T.size(0) >= table.end_row(), "the segments end at row ",
              table.end_row(), " > ", rows_T.size(0), " rows");
}

}  // namespace

at::Tensor Forward(const at::Tensor& x_TI, const RoutingTable& table,
                   const LoraSite& site, bool keeps_shrunk, at::Tensor& y_TO,
                   CUstream_st* stream) {
  const k::LoraProduct of_a = table.ProductsOfA(site);
  if (of_a.max_rank == 0) return {};
  CheckRows(x_TI, table);
  CheckRows(y_TO, table);
  const k::LoraProduct of_b = table.ProductsOfB(site);
  at::Tensor s_TR;
  if (keeps_shrunk) s_TR = EmptyShrunk(x_TI, of_a);
  RunFewRows(OfFewRows(x_TI, y_TO, s_TR, of_a, of_b), x_TI,
             k::RunLoraFewRowsExpand, stream);
  if (table.table().num_long_blocks > 0) {
    const at::Tensor shrunk_TR = keeps_shrunk ? s_TR : EmptyShrunk(x_TI, of_a);
    RunShrink(On(x_TI, shrunk_TR, LongSegments(of_a)), shrunk_TR, stream);
    Check(RunLoraExpand(On(y_TO, shrunk_TR, LongSegments(of_b)), stream),
          "product of the adapters");
  }
  return s_TR;
}

at::Tensor Shrink(const at::Tensor& x_TI, const RoutingTable& table,
                  const LoraSite& site, CUstream_st* stream) {
  const k::LoraProduct of_a = table.ProductsOfA(site);
  if (of_a.max_rank == 0) return {};
  CheckRows(x_TI, table);
  const at::Tensor s_TR = EmptyShrunk(x_TI, of_a);
  RunFewRows(OfFewRows(x_TI, /*y_TO=*/{}, s_TR, of_a, /*of_b=*/{}), x_TI,
             k::RunLoraFewRowsSum, stream);
  RunShrink(On(x_TI, s_TR, LongSegments(of_a)), s_TR, stream);
  return s_TR;
}

void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const at::Tensor& s_TR, const RoutingTable& table,
              const LoraSite& site, at::Tensor& dx_TI, CUstream_st* stream) {
  if (!s_TR.defined()) return;
  TORCH_CHECK(s_TR.size(0) == dy_TO.size(0), "the forward pass kept ",
              s_TR.size(0), " rows of x A^T, the backward pass has ",
              dy_TO.size(0));
  const k::LoraProduct of_a = table.ProductsOfA(site);
  const k::LoraProduct of_b = table.ProductsOfB(site);
  // ds includes each projection's scale, so one product by the stacked A serves
  // all projections.
  const at::Tensor ds_TR = at::empty_like(s_TR);
  RunShrink(On(dy_TO, ds_TR, of_b), ds_TR, stream);
  RunGradient(On(dy_TO, s_TR, of_b), s_TR, stream);
  RunGradient(On(x_TI, ds_TR, of_a), ds_TR, stream);
  if (!dx_TI.defined()) return;
  Check(RunLoraExpand(On(dx_TI, ds_TR, of_a), stream),
        "product of the adapters");
}

}  // namespace weft::lora::cuda
