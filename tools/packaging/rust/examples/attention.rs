//! flashjit from Rust: its messages, and causal attention by the CPU reference, which needs no GPU.
//!
//! ```sh
//! FLASHJIT_LIB_DIR=<prefix>/lib cargo run --example attention
//! ```

use flashjit_sys::*;
use std::ffi::{CStr, CString};
use std::ptr::{null_mut, NonNull};

/// What the library says of the last call that failed in this thread.
fn message() -> String {
    unsafe { CStr::from_ptr(flashjit_last_error_message()) }.to_string_lossy().into_owned()
}

struct Spec(NonNull<flashjit_spec>);

impl Spec {
    fn new(text: &str) -> Result<Self, String> {
        let text = CString::new(text).map_err(|error| error.to_string())?;
        let mut spec = null_mut();
        match unsafe { flashjit_spec_create(text.as_ptr(), &mut spec) } {
            FLASHJIT_OK => Ok(Self(NonNull::new(spec).expect("a spec"))),
            _ => Err(message()),
        }
    }
}

impl Drop for Spec {
    fn drop(&mut self) {
        unsafe { flashjit_spec_destroy(self.0.as_ptr()) }
    }
}

/// A contiguous [1, 1, length, dim].
fn view(data: *mut f32, length: i64, dim: i64) -> flashjit_tensor {
    flashjit_tensor { data: data.cast(), size: [1, 1, length, dim], stride: [length * dim, length * dim, dim, 1] }
}

fn causal_attention(q: &mut [f32], k: &mut [f32], v: &mut [f32], length: i64, dim: i64) -> Result<(Vec<f32>, Vec<f32>), String> {
    let spec = Spec::new(&format!("fp32:d{dim}:causal"))?;
    let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; length as usize]);
    let args = flashjit_forward_args {
        q: view(q.as_mut_ptr(), length, dim),
        k: view(k.as_mut_ptr(), length, dim),
        v: view(v.as_mut_ptr(), length, dim),
        out: view(out.as_mut_ptr(), length, dim),
        lse: lse.as_mut_ptr(),
        ..Default::default()
    };
    match unsafe { flashjit_reference_forward(spec.0.as_ptr(), &args) } {
        FLASHJIT_OK => Ok((out, lse)),
        _ => Err(message()),
    }
}

fn main() {
    println!("flashjit {}", unsafe { CStr::from_ptr(flashjit_version()) }.to_string_lossy());
    println!("refused: {}", Spec::new("fp16:d7").err().expect("a head dimension of 7 is refused"));

    let (length, dim) = (5, 8);
    let numbers = |seed: usize| (0..length * dim).map(|i| ((i * 7 + seed * 3) % 11) as f32 / 11.0).collect::<Vec<f32>>();
    let (mut q, mut k, mut v) = (numbers(1), numbers(2), numbers(3));
    let (out, lse) = causal_attention(&mut q, &mut k, &mut v, length as i64, dim as i64).expect("causal attention");

    for row in 0..length {
        let at = |x: &[f32], i: usize| x[i * dim..(i + 1) * dim].to_vec();
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
        let weights: Vec<f32> = (0..=row).map(|i| (dot(&at(&q, row), &at(&k, i)) / (dim as f32).sqrt()).exp()).collect();
        let total: f32 = weights.iter().sum();
        assert!((lse[row] - total.ln()).abs() < 1e-5);
        for column in 0..dim {
            let wanted: f32 = weights.iter().enumerate().map(|(i, w)| w / total * v[i * dim + column]).sum();
            assert!((out[row * dim + column] - wanted).abs() < 1e-5);
        }
    }
    println!("causal attention: the same as written out, {length} rows of {dim}");

    let mut runtime = null_mut();
    let options = flashjit_options { cache_dir: c"".as_ptr(), ..Default::default() };
    assert_eq!(unsafe { flashjit_runtime_create(&options, &mut runtime) }, FLASHJIT_OK);
    let shape = flashjit_shape { batch: 1, heads_q: 2, heads_kv: 2, seqlen_q: 128, seqlen_kv: 128 };
    let spec = Spec::new("fp16:d64").expect("a spec");
    let mut device = flashjit_device::default();
    assert_eq!(unsafe { flashjit_device_of(c"sm_80".as_ptr(), &mut device) }, FLASHJIT_OK);
    assert_eq!(unsafe { flashjit_can(FLASHJIT_FORWARD, spec.0.as_ptr(), &shape, &device) }, FLASHJIT_OK);
    let status = unsafe { flashjit_current_device(runtime, &mut device) };
    assert!(status == FLASHJIT_NO_DRIVER || status == FLASHJIT_NO_DEVICE, "no CUDA context is current here");
    println!("on a GPU: {}", message());
    unsafe { flashjit_runtime_destroy(runtime) }
}
