#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/commands.h"
#include "cli/device.h"
#include "cli/output.h"
#include "cli/ranges.h"
#include "infer/decoder.h"
#include "infer/sampler.h"
#include "train/saved_model.h"

namespace tessera::cli {
namespace {

struct Args {
  std::string checkpoint, prompt, prompt_file, tokenizer;
  Device device = Device::cpu;
  int64_t tokens = 256;
  infer::SamplingOptions sampling{.temperature = 0.8, .top_p = 0.95, .seed = 1};
  bool json = false;
};

std::string read_prompt(const Args& args) {
  if (args.prompt_file.empty()) return args.prompt;
  std::ifstream in(args.prompt_file, std::ios::binary);
  if (!in) fail_user("{}: cannot be read; name a text file with the prompt", args.prompt_file);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void run(const Args& args) {
  const train::SavedModel saved = train::load_saved_model(args.checkpoint, args.device);
  const auto tokenizer = args.tokenizer.empty() ? saved.tokenizer() : data::load_tokenizer(args.tokenizer);
  const std::string prompt = read_prompt(args);
  std::vector<int32_t> ids = tokenizer->encode(prompt);
  if (ids.empty()) ids.push_back(tokenizer->eos_id());  // a document begins after the end of another
  const int64_t prompt_tokens = static_cast<int64_t>(ids.size());
  const int64_t allowed = std::min(saved.model.config().vocabulary, tokenizer->vocab_size());

  const auto begin = std::chrono::steady_clock::now();
  infer::Decoder decoder(saved.model, saved.weights, prompt_tokens + args.tokens, Product::f32, args.device);
  infer::Sampler sampler(args.sampling);
  data::StreamDecoder stream(tokenizer);
  if (!args.json) print(prompt);
  std::string text;
  int64_t generated = 0;
  std::span<const int32_t> next(ids);
  int32_t id = 0;
  while (generated < args.tokens) {
    const auto logits = decoder.append(next);
    id = sampler.draw(logits, decoder.length(), allowed);
    if (id == tokenizer->eos_id()) break;
    ++generated;
    const std::string piece = stream.push(id);
    text += piece;
    if (!args.json) print(piece);
    next = std::span<const int32_t>(&id, 1);
  }
  const std::string rest = stream.finish();
  text += rest;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (!args.json) return print(rest + "\n");
  print_json({{"checkpoint", saved.path},
              {"prompt", prompt},
              {"text", text},
              {"prompt_tokens", prompt_tokens},
              {"generated_tokens", generated},
              {"ended", id == tokenizer->eos_id()},
              {"seconds", seconds},
              {"tokens_per_s", double(generated) / seconds},
              {"cache_bytes", decoder.cache_bytes()}});
}

}  // namespace

void add_generate(CLI::App& app) {
  auto args = std::make_shared<Args>();
  CLI::App* command = app.add_subcommand("generate", "Sample text from a checkpoint, streaming to the terminal");
  command->add_option("checkpoint", args->checkpoint, "Checkpoint or run directory")->required();
  auto* prompt = command->add_option("--prompt", args->prompt, "Text to continue");
  command->add_option("--prompt-file", args->prompt_file, "File with the text to continue")->excludes(prompt);
  command->add_option("--tokens", args->tokens, "Most tokens to generate")->capture_default_str()->check(at_least(1));
  command->add_option("--temperature", args->sampling.temperature, "0: always the likeliest token")
      ->capture_default_str()
      ->check(at_least(0));
  command->add_option("--top-p", args->sampling.top_p, "Draw from the likeliest tokens that sum to this probability")
      ->capture_default_str()
      ->check(between(0, 1.0));
  command->add_option("--seed", args->sampling.seed, "Same seed, same text")->capture_default_str();
  command->add_option("--tokenizer", args->tokenizer, "\"bytes\" or a SentencePiece model; default: the checkpoint's");
  add_device_option(*command, args->device);
  command->add_flag("--json", args->json, "Print text and figures as JSON");
  command->callback([args] { run(*args); });
}

}  // namespace tessera::cli
