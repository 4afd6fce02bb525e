//! The lab by itself: `uzswap-lab [lab] kernel …`, for work on the lab without the command.

fn main() {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|a| a == "lab") {
        args.remove(0);
    }
    std::process::exit(uzswap_lab::main(args));
}
