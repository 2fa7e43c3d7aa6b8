// The commands. Each function declares one sub-command with its options and sets as its callback the function that runs
// it; the work itself lies in the libraries. A callback that throws ends the program (main.cc): UserError with exit
// code 2, anything else with 1; CLI::RuntimeError(1) ends with 1 without a message, for a command whose printed results
// already say that the work failed.
#pragma once

namespace CLI {
class App;
}

namespace tessera::cli {

void add_train(CLI::App& app);
void add_generate(CLI::App& app);
void add_eval(CLI::App& app);
void add_data(CLI::App& app);
void add_ckpt(CLI::App& app);
void add_plan(CLI::App& app);
void add_plan_layout(CLI::App& group);     // of `plan`
void add_plan_manifests(CLI::App& group);  // of `plan`
void add_bench(CLI::App& app);
void add_selfcheck(CLI::App& app);
void add_doctor(CLI::App& app);

}  // namespace tessera::cli
