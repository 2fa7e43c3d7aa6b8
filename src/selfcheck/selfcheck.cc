#include "selfcheck/selfcheck.h"

#include "ops/attn_res/cases.h"
#include "ops/cross_entropy/cases.h"
#include "ops/elementwise/cases.h"
#include "ops/embedding/cases.h"
#include "ops/experts/cases.h"
#include "ops/glu/cases.h"
#include "ops/kda/cases.h"
#include "ops/l2_norm/cases.h"
#include "ops/linear/cases.h"
#include "ops/mla/cases.h"
#include "ops/rms_norm/cases.h"
#include "ops/router/cases.h"
#include "ops/short_conv/cases.h"
#include "ops/sigmoid_gate/cases.h"
#include "optim/cuda_check.h"

namespace tessera::selfcheck {

const std::vector<const check::OpTable*>& op_tables() {
  static const std::vector<const check::OpTable*> tables{&ops::embedding::table(),
                                                         &ops::attn_res::table(),
                                                         &ops::rms_norm::table(),
                                                         &ops::linear::table(),
                                                         &ops::short_conv::table(),
                                                         &ops::l2_norm::table(),
                                                         &ops::kda::table(),
                                                         &ops::mla::table(),
                                                         &ops::sigmoid_gate::table(),
                                                         &ops::router::table(),
                                                         &ops::router::z_loss::table(),
                                                         &ops::glu::table(),
                                                         &ops::experts::table(),
                                                         &ops::elementwise::table(),
                                                         &ops::cross_entropy::table()};
  return tables;
}

std::vector<check::Result> run(const std::string& only, Device device,
                               const std::function<void(const std::vector<check::Result>&)>& report) {
  std::vector<check::Result> all;
  const auto add = [&](std::vector<check::Result> part) {
    if (report) report(part);
    all.insert(all.end(), part.begin(), part.end());
  };
  std::string known;
  for (const check::OpTable* table : op_tables()) {
    known += table->op + ", ";
    if (!only.empty() && only != table->op) continue;
    add(device == Device::cuda ? check::check_all_cuda(*table) : check::check_all(*table));
  }
  if (only.empty() || only == "model") {
    for (const model::ModelConfig& config : tiny_models()) {
      add(device == Device::cuda ? check_model_cuda(config) : check_model(config));
    }
  }
  if (device == Device::cuda && (only.empty() || only == "optimizer")) add(optim::check_cuda());
  if (device == Device::cuda) known += "optimizer, ";
  if (all.empty()) fail_user("no op named '{}' to check; known: {}model", only, known);
  return all;
}

}  // namespace tessera::selfcheck
