//! Finds an installed libflashjit: in FLASHJIT_LIB_DIR, else by pkg-config.

use std::{env, process::Command};

fn main() {
    println!("cargo:rerun-if-env-changed=FLASHJIT_LIB_DIR");
    let folder = env::var("FLASHJIT_LIB_DIR").unwrap_or_else(|_| {
        let asked = Command::new("pkg-config").args(["--variable=libdir", "flashjit"]).output();
        match asked {
            Ok(output) if output.status.success() => String::from_utf8(output.stdout).unwrap().trim().to_string(),
            _ => panic!("libflashjit is not found: set FLASHJIT_LIB_DIR to its folder, or PKG_CONFIG_PATH to that of flashjit.pc"),
        }
    });
    println!("cargo:rustc-link-search=native={folder}");
    println!("cargo:rustc-link-lib=dylib=flashjit");
    println!("cargo:rustc-link-arg-examples=-Wl,-rpath,{folder}");
}
