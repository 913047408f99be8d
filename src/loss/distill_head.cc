#include "src/loss/distill_head.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "src/loss/head_chunks.h"
#include "src/loss/head_products.h"
#include "src/ops/host_copy.h"

namespace weft::loss {
namespace {

// The elements of a block, between whose operations the temporaries of a row
// live. On a CPU the block stays in a cache; on CUDA launches cost more.
constexpr int64_t kCpuBlock = int64_t{1} << 18;
constexpr int64_t kCudaBlock = int64_t{1} << 23;
// The temporaries of a block that exist at once.
constexpr int64_t kBlockTemporaries = 6;

int64_t BlockRows(int64_t vocab, bool is_cpu) {
  return std::max<int64_t>(1, (is_cpu ? kCpuBlock : kCudaBlock) / vocab);
}

// Calls visit(first row, rows, divergence) for blocks of a chunk's rows which
// have one divergence.
void ForEachBlock(
    const HeadChunk& chunk, const std::vector<Divergence>& divergences,
    const std::function<void(int64_t, int64_t, const Divergence&)>& visit) {
  const at::Tensor& logits_RV = chunk.logits_RV;
  const int64_t most = BlockRows(logits_RV.size(1), logits_RV.is_cpu());
  for (int64_t begin = 0; begin < chunk.count;) {
    const Divergence& own = divergences[chunk.begin + begin];
    int64_t end = begin + 1;
    while (end < chunk.count && end - begin < most &&
           divergences[chunk.begin + end] == own) {
      ++end;
    }
    visit(begin, end - begin, own);
    begin = end;
  }
}

// Replaces the chunk's logits by z = softcap(logits) / temperature.
void ScaleLogits(HeadChunk& chunk) {
  const double softcap = chunk.input.softcap;
  if (softcap > 0) chunk.logits_RV.div_(softcap).tanh_().mul_(softcap);
  chunk.logits_RV.div_(chunk.input.temperature_R.unsqueeze(1));
}

// Returns the log-sum-exp of z, over the rank's part of the vocabulary.
at::Tensor LogSumExp(const HeadChunk& chunk,
                     const std::vector<Divergence>& divergences) {
  at::Tensor lse_R = at::empty({chunk.count}, chunk.logits_RV.options());
  ForEachBlock(
      chunk, divergences,
      [&](int64_t begin, int64_t count, const Divergence& /*all*/) {
        lse_R.narrow(0, begin, count)
            .copy_(chunk.logits_RV.narrow(0, begin, count).logsumexp(1));
      });
  return lse_R;
}

// Returns log m of JS. Stays finite where p and q underflow.
at::Tensor LogMixture(const at::Tensor& lp, const at::Tensor& lq, double beta) {
  return at::logaddexp(lq + std::log(beta), lp + std::log1p(-beta));
}

// Sums over the vocabulary, one for each row. `mean` is the sum in dz: the loss
// of reverse KL, and sum p g of JS.
struct RowSums {
  at::Tensor divergence;
  at::Tensor mean;     // Undefined for forward KL, which has none.
  at::Tensor entropy;  // Undefined if not wanted.
};

RowSums SumRows(const at::Tensor& lp, const at::Tensor& lq,
                const Divergence& divergence, bool want_entropy) {
  RowSums sums;
  const at::Tensor p = lp.exp();
  if (want_entropy) sums.entropy = (p * lp).sum(1).neg_();
  switch (divergence.function) {
    case LossFunction::kForwardKl:
      sums.divergence = (lq - lp).mul_(lq.exp()).sum(1);
      break;
    case LossFunction::kReverseKl:
      sums.divergence = (lp - lq).mul_(p).sum(1);
      sums.mean = sums.divergence;
      break;
    case LossFunction::kJs: {
      const double beta = divergence.beta;
      const at::Tensor lm = LogMixture(lp, lq, beta);
      sums.mean = (lp - lm).mul_(p).sum(1).mul_(1 - beta);
      sums.divergence = (lq - lm).mul_(lq.exp()).sum(1).mul_(beta) + sums.mean;
      break;
    }
    default:
      TORCH_CHECK(false, "loss function ",
                  static_cast<int>(divergence.function), " has no teacher");
  }
  return sums;
}

// Returns dz for a block. mean_R1 is the sum in dz, a column.
at::Tensor GradientOfZ(const at::Tensor& lp, const at::Tensor& lq,
                       const Divergence& divergence,
                       const at::Tensor& mean_R1) {
  at::Tensor dz = lp.exp();
  switch (divergence.function) {
    case LossFunction::kForwardKl:
      return dz.sub_(lq.exp());
    case LossFunction::kReverseKl:
      return dz.mul_((lp - lq).sub_(mean_R1));
    default:
      return dz.mul_((lp - LogMixture(lp, lq, divergence.beta))
                         .mul_(1 - divergence.beta)
                         .sub_(mean_R1));
  }
}

// The rows of both models, chunk by chunk. The arguments outlive the object.
class PairedChunks {
 public:
  PairedChunks(const at::Tensor& hidden_RH, const at::Tensor& teacher_RH,
               const at::Tensor& weight_VH, const DistillRows& rows,
               const HeadOptions& options)
      : rows_(rows),
        options_(options),
        teacher_rows_{.row_offsets = std::vector<int64_t>(
                          rows.scores.row_offsets.size(), 0),
                      .targets = {},
                      .temperatures = rows.scores.temperatures,
                      .filters = {},
                      .routing = rows.teacher_routing},
        student_(hidden_RH, weight_VH, rows.scores, options),
        teacher_(teacher_RH, weight_VH, teacher_rows_, options, /*buffer=*/1) {}

  const HeadLora& lora() const { return student_.lora(); }
  const HeadLora& teacher_lora() const { return teacher_.lora(); }

  // Calls visit(student's chunk, teacher's chunk) with z in place of logits.
  template <typename Visit>
  void ForEach(int64_t begin, int64_t end, const DistillResult& result,
               const Visit& visit) const {
    student_.ForEach(begin, end, result.shrunk_nR, [&](HeadChunk& student) {
      ScaleLogits(student);
      teacher_.ForEach(student.begin, student.begin + student.count,
                       result.teacher_shrunk_nR, [&](HeadChunk& teacher) {
                         ScaleLogits(teacher);
                         visit(student, teacher);
                       });
    });
  }

  // Sets the results of the chunk's rows, and replaces z by log-probabilities.
  void Score(HeadChunk& student, HeadChunk& teacher,
             DistillResult& result) const;
  // Replaces the student's log-probabilities by dz * D.
  void ToGradient(HeadChunk& student, const HeadChunk& teacher,
                  const DistillResult& result) const;
  // Replaces z by log-probabilities, with the log-sum-exps of `result`.
  static void Normalize(HeadChunk& student, HeadChunk& teacher,
                        const DistillResult& result);

 private:
  // Returns the log-probabilities of the chunk's targets. Those which another
  // rank has are 0.
  at::Tensor TargetsOf(const HeadChunk& student) const;
  // Sums `part` [k, R] over the ranks.
  at::Tensor OverRanks(const at::Tensor& part) const;

  const DistillRows& rows_;
  const HeadOptions& options_;
  const ScoreRows teacher_rows_;
  const HeadChunks student_;
  const HeadChunks teacher_;
};

// Returns a chunk's rows of a tensor [R, ...].
at::Tensor RowsOf(const at::Tensor& all, const HeadChunk& chunk) {
  return all.narrow(0, chunk.begin, chunk.count);
}

at::Tensor PairedChunks::TargetsOf(const HeadChunk& student) const {
  const auto first = rows_.scores.targets.begin() + student.begin;
  const at::Device device = student.logits_RV.device();
  const at::Tensor target_R1 =
      ops::ToDevice(std::vector<int64_t>(first, first + student.count), device)
          .unsqueeze(1);
  if (options_.shard.group == nullptr) {
    return student.logits_RV.gather(1, target_R1).squeeze(1);
  }
  const parallel::Range range =
      options_.shard.group->shard().Of(options_.shard.vocab);
  const at::Tensor own_R1 =
      (target_R1 - range.begin)
          .clamp(0, std::max<int64_t>(0, range.size() - 1));
  const at::Tensor inside_R1 =
      target_R1.ge(range.begin).logical_and_(target_R1.lt(range.end));
  return student.logits_RV.gather(1, own_R1).mul_(inside_R1).squeeze(1);
}

at::Tensor PairedChunks::OverRanks(const at::Tensor& part) const {
  if (options_.shard.group == nullptr) return part;
  return options_.shard.group->AllGather(part.contiguous()).sum(0);
}

void PairedChunks::Normalize(HeadChunk& student, HeadChunk& teacher,
                             const DistillResult& result) {
  student.logits_RV.sub_(RowsOf(result.lse_R, student).unsqueeze(1));
  teacher.logits_RV.sub_(RowsOf(result.teacher_lse_R, student).unsqueeze(1));
}

void PairedChunks::Score(HeadChunk& student, HeadChunk& teacher,
                         DistillResult& result) const {
  at::Tensor lse_2R = at::stack({LogSumExp(student, rows_.divergences),
                                 LogSumExp(teacher, rows_.divergences)});
  if (parallel::Communicator* const group = options_.shard.group) {
    lse_2R = group->AllGather(lse_2R).logsumexp(0);
  }
  RowsOf(result.lse_R, student).copy_(lse_2R[0]);
  RowsOf(result.teacher_lse_R, student).copy_(lse_2R[1]);
  Normalize(student, teacher, result);

  const bool want_entropy = result.entropies_R.defined();
  at::Tensor sums_XR = at::zeros({4, student.count}, lse_2R.options());
  ForEachBlock(student, rows_.divergences,
               [&](int64_t begin, int64_t count, const Divergence& own) {
                 const RowSums sums =
                     SumRows(student.logits_RV.narrow(0, begin, count),
                             teacher.logits_RV.narrow(0, begin, count), own,
                             want_entropy);
                 const at::Tensor out = sums_XR.narrow(1, begin, count);
                 out[0].copy_(sums.divergence);
                 if (sums.mean.defined()) out[1].copy_(sums.mean);
                 if (want_entropy) out[2].copy_(sums.entropy);
               });
  sums_XR[3].copy_(TargetsOf(student));
  sums_XR = OverRanks(sums_XR);
  RowsOf(result.divergences_R, student).copy_(sums_XR[0]);
  RowsOf(result.mean_R, student).copy_(sums_XR[1]);
  if (want_entropy) RowsOf(result.entropies_R, student).copy_(sums_XR[2]);
  RowsOf(result.logprobs_R, student).copy_(sums_XR[3]);
}

void PairedChunks::ToGradient(HeadChunk& student, const HeadChunk& teacher,
                              const DistillResult& result) const {
  const double softcap = student.input.softcap;
  const at::Tensor mean_R1 = RowsOf(result.mean_R, student).unsqueeze(1);
  const at::Tensor lse_R1 = RowsOf(result.lse_R, student).unsqueeze(1);
  ForEachBlock(
      student, rows_.divergences,
      [&](int64_t begin, int64_t count, const Divergence& own) {
        const at::Tensor lp = student.logits_RV.narrow(0, begin, count);
        at::Tensor dz =
            GradientOfZ(lp, teacher.logits_RV.narrow(0, begin, count), own,
                        mean_R1.narrow(0, begin, count));
        if (softcap > 0) {
          // tanh(logit / softcap), from z = lp + lse.
          const at::Tensor tanh =
              (lp + lse_R1.narrow(0, begin, count))
                  .mul_(student.input.temperature_R.narrow(0, begin, count)
                            .unsqueeze(1))
                  .div_(softcap);
          dz.mul_(1 - tanh.square());
        }
        lp.copy_(dz);
      });
}

void CheckPairs(const at::Tensor& hidden_RH, const at::Tensor& teacher_RH,
                const DistillRows& rows) {
  const size_t num_rows = static_cast<size_t>(hidden_RH.size(0));
  TORCH_CHECK(
      teacher_RH.sizes() == hidden_RH.sizes() &&
          rows.scores.targets.size() == num_rows &&
          rows.scores.row_offsets.size() == num_rows + 1 &&
          rows.scores.temperatures.size() == num_rows &&
          rows.scores.filters.empty() && rows.divergences.size() == num_rows,
      "distillation has ", hidden_RH.sizes(), " rows, ", teacher_RH.sizes(),
      " of the teacher, ", rows.scores.targets.size(), " targets and ",
      rows.divergences.size(), " divergences");
}

DistillResult AllocateDistillation(const at::Tensor& hidden_RH,
                                   const at::TensorOptions& options,
                                   bool want_gradient, bool want_entropy) {
  const int64_t num_rows = hidden_RH.size(0);
  const auto row = [&] { return at::empty({num_rows}, options); };
  DistillResult result{.logprobs_R = row(), .divergences_R = row()};
  if (want_entropy) result.entropies_R = row();
  if (want_gradient) {
    result.projection_RH = at::empty({num_rows, hidden_RH.size(1)}, options);
  }
  result.lse_R = row();
  result.teacher_lse_R = row();
  result.mean_R = row();
  return result;
}

}  // namespace

int64_t DistillBlockBytes(int64_t vocab, bool is_cpu) {
  return BlockRows(vocab, is_cpu) * vocab * kBlockTemporaries *
         static_cast<int64_t>(sizeof(float));
}

DistillResult ScoreDistillation(const at::Tensor& hidden_RH,
                                const at::Tensor& teacher_RH,
                                const at::Tensor& weight_VH,
                                const DistillRows& rows,
                                const HeadOptions& options, bool want_gradient,
                                bool want_entropy) {
  CheckPairs(hidden_RH, teacher_RH, rows);
  DistillResult result = AllocateDistillation(
      hidden_RH, weight_VH.options().dtype(HeadComputeType(weight_VH)),
      want_gradient, want_entropy);
  const int64_t num_rows = hidden_RH.size(0);
  if (num_rows == 0) return result;
  const PairedChunks chunks(hidden_RH, teacher_RH, weight_VH, rows, options);
  result.shrunk_nR = chunks.lora().Shrink(hidden_RH);
  result.teacher_shrunk_nR = chunks.teacher_lora().Shrink(teacher_RH);
  chunks.ForEach(0, num_rows, result,
                 [&](HeadChunk& student, HeadChunk& teacher) {
                   chunks.Score(student, teacher, result);
                   if (!want_gradient) return;
                   chunks.ToGradient(student, teacher, result);
                   at::Tensor out_RH = RowsOf(result.projection_RH, student);
                   ComputeProjection(student.logits_RV, weight_VH, out_RH);
                   chunks.lora().Project(student.logits_RV, student.begin,
                                         result.projected_nR);
                 });
  return result;
}

at::Tensor DistillBackward(DistillResult forward, const at::Tensor& hidden_RH,
                           const at::Tensor& teacher_RH,
                           const at::Tensor& weight_VH, const DistillRows& rows,
                           const HeadOptions& options, const at::Tensor& g_R,
                           const lora::LoraGradients& gradients) {
  TORCH_CHECK(forward.projection_RH.defined(),
              "DistillBackward needs want_gradient in the forward");
  at::Tensor dhidden_RH = std::move(forward.projection_RH);
  if (hidden_RH.size(0) == 0) return dhidden_RH.to(hidden_RH.scalar_type());
  const at::Device device = weight_VH.device();
  const at::Tensor factor_R1 =
      ops::ToDevice(g_R, device)
          .to(dhidden_RH.scalar_type())
          .div(ops::ToDevice(rows.scores.temperatures, device))
          .unsqueeze(1);
  dhidden_RH.mul_(factor_R1);
  const PairedChunks chunks(hidden_RH, teacher_RH, weight_VH, rows, options);
  const HeadLora& lora = chunks.lora();
  for (size_t s = 0; s < rows.scores.routing.size(); ++s) {
    if (!lora.Trains(s)) continue;
    const lora::LoraSegment& segment = rows.scores.routing[s];
    const at::Tensor gradient_N = GradientOf(gradients, segment.version);
    at::Tensor& ds_nR = forward.projected_nR[s];
    ds_nR.mul_(lora::SegmentRows(factor_R1, segment));
    lora.AddGradientOfHidden(s, ds_nR, dhidden_RH);
    if (!gradient_N.defined()) continue;
    lora.AddGradientOfA(s, ds_nR, hidden_RH, gradient_N);
    chunks.ForEach(segment.begin, segment.end, forward,
                   [&](HeadChunk& student, HeadChunk& teacher) {
                     PairedChunks::Normalize(student, teacher, forward);
                     chunks.ToGradient(student, teacher, forward);
                     student.logits_RV.mul_(RowsOf(factor_R1, student));
                     lora.AddGradientOfB(s, student.logits_RV, student.begin,
                                         forward.shrunk_nR[s], gradient_N);
                   });
  }
  if (parallel::Communicator* const group = options.shard.group) {
    group->AllReduce(dhidden_RH);
  }
  return dhidden_RH.to(hidden_RH.scalar_type());
}

}  // namespace weft::loss
