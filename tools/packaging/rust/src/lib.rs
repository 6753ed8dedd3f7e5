//! flashjit's C interface as `flashjit/flashjit.h` declares it, without context parallelism. Null and 0 mean what they mean
//! there; `struct_size` is the size of the struct, by which the library refuses callers built for another version.

#![no_std]
#![allow(non_camel_case_types)]

/// Structs of the interface begin as zeros, with their size.
macro_rules! zeros_with_size {
    ($($name:ident),* $(,)?) => {$(
        impl Default for $name {
            fn default() -> Self {
                // Numbers and pointers alone, for which zeros are values.
                Self { struct_size: core::mem::size_of::<Self>(), ..unsafe { core::mem::zeroed() } }
            }
        }
    )*};
}
pub(crate) use zeros_with_size;

mod c_interface;
pub use c_interface::*;
