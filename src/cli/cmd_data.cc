#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/ranges.h"
#include "core/error.h"
#include "data/build.h"
#include "data/inspect.h"
#include "data/sentencepiece.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct BuildArgs {
  std::vector<std::string> inputs;
  std::string kind = "auto", text_field = "text";
  bool one_document = false, json = false;
  int64_t train_vocabulary = 0;
  data::BuildOptions options;
};

// "PATH" or "KIND=PATH"
data::Input parse_input(const BuildArgs& args, const std::string& text) {
  data::Input input{text, data::parse_kind(args.kind), args.text_field, args.one_document};
  const size_t equals = text.find('=');
  if (equals == std::string::npos || fs::exists(text)) return input;
  input.kind = data::parse_kind(text.substr(0, equals));
  input.path = text.substr(equals + 1);
  return input;
}

// Trains a vocabulary on the inputs, unless the file is there already.
void train_vocabulary(BuildArgs& args) {
  if (args.options.tokenizer == "bytes") args.options.tokenizer = args.options.out + ".model";
  if (fs::exists(args.options.tokenizer)) {
    const int64_t there = data::load_tokenizer(args.options.tokenizer)->vocab_size();
    if (there == args.train_vocabulary) return;
    fail_user(
        "{}: holds a vocabulary of {} ids, and --train-vocabulary asks for {}; remove the file, or name another "
        "with --tokenizer",
        args.options.tokenizer, there, args.train_vocabulary);
  }
  data::ImportSummary ignored;
  std::vector<data::Unit> units;
  for (const data::Input& input : args.options.inputs) {
    for (data::Unit& unit : data::list_units(input, ignored)) units.push_back(std::move(unit));
  }
  std::vector<data::Document> waiting;
  size_t unit = 0;
  data::train_sentencepiece(
      [&](std::string& text) {
        while (waiting.empty() && unit < units.size()) waiting = data::import_unit(units[unit++]).documents;
        if (waiting.empty()) return false;
        text = std::move(waiting.back().text);
        waiting.pop_back();
        return true;
      },
      {.vocab_size = args.train_vocabulary}, args.options.tokenizer);
}

Json split_json(const data::BuildSummary::Split& s) {
  return {
      {"documents", s.documents}, {"tokens", s.tokens}, {"text_bytes", s.text_bytes}, {"fingerprint", s.fingerprint}};
}

void build(BuildArgs& args) {
  for (const std::string& text : args.inputs) args.options.inputs.push_back(parse_input(args, text));
  if (args.train_vocabulary > 0) train_vocabulary(args);
  const data::BuildSummary s = data::build_store(args.options, [](const data::BuildProgress& p) {
    show_progress(fmt::format("{} of {} read, {} tokens", human_bytes(p.bytes_done), human_bytes(p.bytes_total),
                              human_count(double(p.tokens))));
  });
  clear_progress();
  if (!args.json) return print(s.describe() + "\n");
  print_json({{"out", args.options.out},
              {"up_to_date", s.up_to_date},
              {"fingerprint", s.fingerprint},
              {"tokenizer", args.options.tokenizer},
              {"files", s.import.files},
              {"documents", s.import.documents},
              {"duplicates", s.duplicates},
              {"too_short", s.too_short},
              {"train", split_json(s.train)},
              {"valid", split_json(s.valid)}});
}

struct InspectArgs {
  std::string store;
  data::InspectOptions options{.context = 1024, .budget_tokens = 0, .sample_document = 0, .sample_tokens = 128};
  bool verify = false, json = false;
};

std::string inspection_text(const data::Inspection& i) {
  Table facts;
  facts.add({"store", i.directory});
  facts.add({"tokenizer", fmt::format("{}, {} ids", i.tokenizer_name, i.vocab_size)});
  facts.add({"documents", fmt::format("{} (tokens: shortest {}, median {}, longest {})", i.documents, i.shortest,
                                      i.median, i.longest)});
  facts.add(
      {"tokens", fmt::format("{} ({:.2f} bytes of text each)", human_count(double(i.tokens)), i.bytes_per_token)});
  facts.add({"files", fmt::format("{}, {} of tokens", human_bytes(i.file_bytes), i.token_files)});
  facts.add({"packed at", fmt::format("{} tokens: {} sequences, {:.3f} % padding, {} documents cut", i.packing.context,
                                      i.packing.sequences, 100 * i.packing.padding, i.packing.cut_documents)});
  if (i.epochs > 0) facts.add({"epochs", fmt::format("{:.2f}", i.epochs)});
  Table lengths({"tokens", "documents"});
  for (size_t b = 0; b < i.histogram.size(); ++b) {
    if (i.histogram[b] > 0)
      lengths.add({fmt::format("{}-{}", int64_t{1} << b, (int64_t{2} << b) - 1), std::to_string(i.histogram[b])});
  }
  return facts.text() + "\n" + lengths.text() +
         fmt::format("\ndocument {} begins:\n{}\n", i.sample_document, i.sample_text);
}

// A build's directory holds train/ and valid/; either can be named too.
std::string store_directory(const std::string& path) {
  return fs::exists(fs::path(path) / "train") ? (fs::path(path) / "train").string() : path;
}

// A damaged store has no figures that could be trusted, only faults.
void report_faults(const InspectArgs& args, const std::string& directory, const std::vector<std::string>& faults) {
  if (args.json) return print_json({{"store", directory}, {"faults", faults}});
  std::string text = directory + ": damaged\n";
  for (const std::string& fault : faults) text += "  " + fault + "\n";
  print(text);
}

void inspect(const InspectArgs& args) {
  const std::string directory = store_directory(args.store);
  const data::Store store(directory);
  const auto tokenizer = data::load_store_tokenizer(fs::path(directory).parent_path().string());
  if (args.verify) {
    if (const auto faults = store.verify(); !faults.empty()) {
      report_faults(args, directory, faults);
      throw CLI::RuntimeError(1);
    }
  }
  const data::Inspection i = data::inspect(store, *tokenizer, args.options);
  if (args.json) {
    print_json({{"store", i.directory},
                {"fingerprint", i.fingerprint},
                {"tokenizer", i.tokenizer_name},
                {"vocabulary", i.vocab_size},
                {"documents", i.documents},
                {"tokens", i.tokens},
                {"text_bytes", i.text_bytes},
                {"bytes_per_token", i.bytes_per_token},
                {"shortest", i.shortest},
                {"median", i.median},
                {"longest", i.longest},
                {"histogram", i.histogram},
                {"context_tokens", i.packing.context},
                {"sequences", i.packing.sequences},
                {"padding", i.packing.padding},
                {"cut_documents", i.packing.cut_documents},
                {"epochs", i.epochs},
                {"faults", Json::array()}});
  } else {
    print(inspection_text(i) + (args.verify ? "verified: every byte as written\n" : ""));
  }
}

}  // namespace

void add_data(CLI::App& app) {
  CLI::App* data_command = app.add_subcommand("data", "Build and inspect token stores");
  data_command->require_subcommand(1);

  auto b = std::make_shared<BuildArgs>();
  CLI::App* build_command =
      data_command->add_subcommand("build", "Tokenise text, HTML, JSONL or source trees into a store");
  build_command->add_option("inputs", b->inputs, "Files and directories; KIND=PATH sets the kind of one")->required();
  build_command->add_option("--out", b->options.out, "Directory to make")->required();
  build_command->add_option("--kind", b->kind, "auto, text, html, jsonl or source")->capture_default_str();
  build_command->add_option("--text-field", b->text_field, "Field of a JSONL line that holds the text")
      ->capture_default_str();
  build_command->add_flag("--one-document", b->one_document, "A source tree becomes one document, dependencies first");
  build_command->add_option("--tokenizer", b->options.tokenizer, "\"bytes\" or a SentencePiece model")
      ->capture_default_str();
  build_command
      ->add_option("--train-vocabulary", b->train_vocabulary,
                   "Train a SentencePiece model of this many ids on the inputs first")
      ->check(between(300, 1000000));
  build_command->add_option("--valid-fraction", b->options.valid_fraction, "Share of documents held out")
      ->capture_default_str()
      ->check(between(0, 0.5));
  build_command->add_option("--min-tokens", b->options.min_tokens, "Shorter documents are dropped")
      ->capture_default_str()
      ->check(at_least(1));
  build_command->add_flag("--replace", b->options.replace, "Replace a store that was built from something else");
  build_command->add_flag("--json", b->json, "Print figures as JSON");
  build_command->callback([b] { build(*b); });

  auto i = std::make_shared<InspectArgs>();
  CLI::App* inspect_command = data_command->add_subcommand("inspect", "What a token store holds");
  inspect_command->add_option("store", i->store, "Store, or its train or valid part")->required();
  inspect_command->add_option("--context", i->options.context, "Sequence length at which packing is measured")
      ->capture_default_str()
      ->check(at_least(1));
  inspect_command
      ->add_option("--budget-tokens", i->options.budget_tokens, "How many epochs a run of so many tokens makes")
      ->check(at_least(0));
  inspect_command->add_option("--document", i->options.sample_document, "Document to show")
      ->capture_default_str()
      ->check(at_least(0));
  inspect_command->add_flag("--verify", i->verify, "Read every byte and compare hashes");
  inspect_command->add_flag("--json", i->json, "Print figures as JSON");
  inspect_command->callback([i] { inspect(*i); });
}

}  // namespace tessera::cli
