// A checkpoint as a model that can be used: its description, its weights, its tokenizer.
#pragma once

#include <memory>
#include <string>

#include "data/tokenizer.h"
#include "model/model.h"

namespace tessera::train {

// What the trainer writes into a checkpoint beside the tensors (Manifest::state_json).
struct SavedState {
  std::string model_toml;
  std::string tokenizer = "bytes";  // or a file name in the run directory; empty: unknown (imported models)
  std::string run_toml;             // empty: not made by `train`
  int64_t step = 0;                 // optimizer steps done
  int64_t tokens = 0;               // tokens seen
  std::string plan_hash;            // data order: {plan hash, next sequence} is all of the loader's state
  int64_t next_sequence = 0;
  double learning_rate = 0;  // of the last step; a check, never read back
  std::string guard = "{}";  // counters of the collapse guard, JSON
};
std::string to_json(const SavedState&);
SavedState parse_saved_state(const std::string& json, const std::string& where);

struct SavedModel {
  std::string path;  // of the checkpoint
  SavedState state;
  model::Model model;
  Arena arena;  // holds the weights, in the memory of the device
  model::Weights weights;

  // Fails where the checkpoint names none (imported models).
  std::shared_ptr<const data::Tokenizer> tokenizer() const;
};

// `path`: a checkpoint, a directory of checkpoints, or a run directory; of several the newest valid one.
std::string find_checkpoint(const std::string& path);
SavedModel load_saved_model(const std::string& path, Device device = Device::cpu);

}  // namespace tessera::train
