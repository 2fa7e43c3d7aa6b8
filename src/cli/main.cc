// The entry point: declares the commands, runs the one that was asked for, and turns what it throws into exit codes.
//   0  done
//   1  the work failed
//   2  what the user gave is wrong
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <iostream>

#include "cli/commands.h"
#include "cli/output.h"
#include "config/nearest.h"
#include "core/error.h"

#ifndef TESSERA_VERSION
#error "the build defines TESSERA_VERSION"
#endif

namespace tessera::cli {
namespace {

// In the order of `tessera --help`.
constexpr void (*kCommands[])(CLI::App&) = {
    add_train, add_generate, add_eval, add_data, add_ckpt, add_plan, add_bench, add_selfcheck, add_doctor,
};

int fail(int code, const std::string& message) {
  clear_progress();
  std::fprintf(stderr, "tessera: %s\n", message.c_str());
  return code;
}

// The command the user was at: "tessera ckpt list".
const CLI::App* innermost_command(const CLI::App& app, std::string& name) {
  const CLI::App* command = &app;
  name = app.get_name();
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    name += " " + command->get_name();
  }
  return command;
}

std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  std::string name;
  const CLI::App* command = innermost_command(app, name);
  std::string message = error.what();
  const bool unexpected = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
  const std::vector<std::string> extras = app.remaining(true);
  if (unexpected && !extras.empty()) {
    const std::string word = extras.front().substr(0, extras.front().find('='));
    std::vector<std::string> known;
    for (const CLI::Option* option : command->get_options()) {
      for (const std::string& long_name : option->get_lnames()) known.push_back("--" + long_name);
    }
    for (const CLI::App* sub : command->get_subcommands(nullptr)) known.push_back(sub->get_name());
    message = "unexpected '" + word + "'" + config::did_you_mean(config::nearest(word, known));
  }
  return message + "\nrun '" + name + " --help' for what can be given";
}

// CLI11 would report a mistyped command as a missing one.
void check_command_name(const CLI::App& app, const std::string& word) {
  if (word.empty() || word.front() == '-') return;
  std::vector<std::string> known;
  for (const CLI::App* command : app.get_subcommands(nullptr)) known.push_back(command->get_name());
  std::string list;
  for (const std::string& name : known) {
    if (name == word) return;
    list += (list.empty() ? "" : ", ") + name;
  }
  fail_user("unknown command '{}'{} (commands: {})\nrun 'tessera --help' for what they do", word,
            config::did_you_mean(config::nearest(word, known)), list);
}

int run(int argc, char** argv) {
  CLI::App app("Trains hybrid mixture-of-experts language models with long context.", "tessera");
  app.set_help_flag("--help", "Print this help");  // no single letters; the commands inherit it
  app.set_version_flag("--version", "tessera " TESSERA_VERSION, "Print the version");
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  for (const auto add : kCommands) add(app);
  app.footer("tessera COMMAND --help lists the options of a command.");
  if (argc < 2) return std::fputs(app.help().c_str(), stderr), kUserMistake;
  try {
    check_command_name(app, argv[1]);
    app.parse(argc, argv);
  } catch (const CLI::Success& asked_for_text) {  // --help and --version
    std::ostringstream text;
    app.exit(asked_for_text, text, text);
    print(text.str());
  } catch (const CLI::RuntimeError& ended) {
    return ended.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return fail(kUserMistake, explain(app, error));
  }
  return 0;
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // a reader that leaves must not kill a run; print() sees it instead
  using namespace tessera;
  try {
    return cli::run(argc, argv);
  } catch (const cli::ReaderGone&) {
    return 0;
  } catch (const std::exception& error) {
    const Ending ending = ending_of(error);
    return cli::fail(ending.exit_code, ending.message);
  }
}
