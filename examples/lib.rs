//! Each file and folder here is a program: `cargo run --example server`.
