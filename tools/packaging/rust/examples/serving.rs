//! A paged cache from Rust, behind a safe wrapper: new rows by slots, attention over pages, two parts of the keys joined, FP8.
//! By the CPU reference, which takes the same arguments as the calls on a GPU, whose pointers are the device's.
//!
//! ```sh
//! FLASHJIT_LIB_DIR=<prefix>/lib cargo run --example serving
//! ```

use flashjit_sys::*;
use std::ffi::{CStr, CString};
use std::ptr::{null_mut, NonNull};

type Result<T> = std::result::Result<T, String>;

fn checked(status: flashjit_status) -> Result<()> {
    match status {
        FLASHJIT_OK => Ok(()),
        _ => Err(unsafe { CStr::from_ptr(flashjit_last_error_message()) }.to_string_lossy().into_owned()),
    }
}

struct Spec(NonNull<flashjit_spec>);

impl Spec {
    fn new(text: &str) -> Result<Self> {
        let text = CString::new(text).map_err(|error| error.to_string())?;
        let mut spec = null_mut();
        checked(unsafe { flashjit_spec_create(text.as_ptr(), &mut spec) })?;
        NonNull::new(spec).map(Self).ok_or_else(|| "no spec".into())
    }
}

impl Drop for Spec {
    fn drop(&mut self) {
        unsafe { flashjit_spec_destroy(self.0.as_ptr()) }
    }
}

/// Numbers in four dimensions that own their memory, contiguous.
#[derive(Clone)]
struct Array<T> {
    data: Vec<T>,
    size: [i64; 4],
}

impl<T: Copy + Default> Array<T> {
    fn new(size: [i64; 4]) -> Self {
        Self { data: vec![T::default(); size.iter().product::<i64>() as usize], size }
    }

    /// What the library reads, or writes where it is of a `&mut`.
    fn view(&self) -> flashjit_tensor {
        let [_, b, c, d] = self.size;
        flashjit_tensor { data: self.data.as_ptr() as *mut _, size: self.size, stride: [b * c * d, c * d, d, 1] }
    }

    fn view_mut(&mut self) -> flashjit_tensor {
        flashjit_tensor { data: self.data.as_mut_ptr().cast(), ..self.view() }
    }

    fn row(&self, a: usize, b: usize, c: usize) -> &[T] {
        let [_, heads, rows, dim] = self.size.map(|size| size as usize);
        &self.data[((a * heads + b) * rows + c) * dim..][..dim]
    }
}

/// K and V in pages, [pages, heads, rows of a page, dim] each, of fp32.
struct PagedCache {
    k: Array<f32>,
    v: Array<f32>,
    stores: Spec,
    attends: Spec,
}

/// The pages of each sequence, and its keys.
struct Sequences<'a> {
    table: &'a [i32],
    columns: usize,
    lengths: &'a [i32],
}

impl Sequences<'_> {
    fn table(&self) -> flashjit_page_table {
        assert_eq!(self.table.len(), self.lengths.len() * self.columns, "a row of the table for each sequence");
        let (sequences, columns) = (self.lengths.len() as i64, self.columns as i64);
        flashjit_page_table { data: self.table.as_ptr(), sequences, columns, stride: columns, starts: std::ptr::null() }
    }
}

impl PagedCache {
    fn new(pages: i64, heads: i64, rows: i64, dim: i64) -> Result<Self> {
        let empty = Array::new([pages, heads, rows, dim]);
        let attends = Spec::new(&format!("fp32:d{dim}:pages{rows}:causal"))?;
        Ok(Self { k: empty.clone(), v: empty, stores: Spec::new(&format!("fp32:d{dim}:cache"))?, attends })
    }

    /// Stores rows [1, heads, n, dim], row i at slots[i], page * rows of a page + row; those with -1 nowhere.
    fn append(&mut self, k: &Array<f32>, v: &Array<f32>, slots: &[i64]) -> Result<()> {
        assert!(k.size == v.size && k.size[0] == 1 && k.size[2] == slots.len() as i64, "a slot for each row");
        let mut args =
            flashjit_append_args { slots: slots.as_ptr().cast(), slots_type: FLASHJIT_ELEMENT_INT64, ..Default::default() };
        (args.k, args.v) = (k.view(), v.view());
        (args.k_cache, args.v_cache) = (self.k.view_mut(), self.v.view_mut());
        checked(unsafe { flashjit_reference_append(self.stores.0.as_ptr(), &args) })
    }

    /// O and LSE of q [sequences, heads, n, dim], the last query of each at its last key.
    fn attend(&self, q: &Array<f32>, sequences: &Sequences) -> Result<(Array<f32>, Vec<f32>)> {
        assert_eq!(q.size[0], sequences.lengths.len() as i64, "queries of each sequence");
        let mut out = Array::new(q.size);
        let mut lse = vec![0.0; (q.size[0] * q.size[1] * q.size[2]) as usize];
        let args = flashjit_forward_args {
            q: q.view(),
            k: self.k.view(),
            v: self.v.view(),
            out: out.view_mut(),
            lse: lse.as_mut_ptr(),
            kv_lengths: sequences.lengths.as_ptr(),
            page_table: sequences.table(),
            ..Default::default()
        };
        checked(unsafe { flashjit_reference_forward(self.attends.0.as_ptr(), &args) })?;
        Ok((out, lse))
    }
}

/// O and LSE over all keys, of states over parts of them.
fn merge(states: &[(&Array<f32>, &[f32])]) -> Result<(Array<f32>, Vec<f32>)> {
    let first = states.first().ok_or("no states")?.0;
    let rows = (first.size[0] * first.size[1] * first.size[2]) as usize;
    assert!(states.iter().all(|(o, lse)| o.size == first.size && lse.len() == rows), "states of one size");
    let parts: Vec<_> = states.iter().map(|(o, lse)| flashjit_partial_state { out: o.view(), lse: lse.as_ptr(), lse_stride: [0; 3] }).collect();
    let (mut out, mut lse) = (Array::new(first.size), vec![0.0; rows]);
    let mut args = flashjit_merge_args { states: parts.as_ptr(), state_count: parts.len(), ..Default::default() };
    (args.out, args.lse) = (out.view_mut(), lse.as_mut_ptr());
    let spec = Spec::new(&format!("fp32:d{}", first.size[3]))?;
    checked(unsafe { flashjit_reference_merge(spec.0.as_ptr(), &args) })?;
    Ok((out, lse))
}

/// e4m3 codes [1, heads, rows, dim] of x, and the scale of each head that they are multiplied with.
fn quantize(x: &Array<f32>) -> Result<(Array<u8>, Vec<f32>)> {
    let mut codes = Array::new(x.size);
    let mut scale = vec![0.0; x.size[1] as usize];
    let view = flashjit_scales { data: scale.as_mut_ptr(), size: [1, 1, x.size[1], 1], stride: [0, 0, 1, 0] };
    let mut args = flashjit_quantize_args { scale: view, ..Default::default() };
    (args.x, args.codes) = (x.view(), codes.view_mut());
    let spec = Spec::new(&format!("fp32:d{}:kve4m3", x.size[3]))?;
    checked(unsafe { flashjit_reference_quantize(spec.0.as_ptr(), &args) })?;
    Ok((codes, scale))
}

/// The same by hand: O and LSE of one query over keys.
fn expected(q: &[f32], keys: &[&[f32]], values: &[&[f32]]) -> (Vec<f32>, f32) {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
    let weights: Vec<f32> = keys.iter().map(|key| (dot(q, key) / (q.len() as f32).sqrt()).exp()).collect();
    let total: f32 = weights.iter().sum();
    let column = |i: usize| weights.iter().zip(values).map(|(w, value)| w / total * value[i]).sum();
    ((0..q.len()).map(column).collect(), total.ln())
}

fn close(a: &[f32], b: &[f32], tolerance: f32) {
    assert!(a.len() == b.len() && a.iter().zip(b).all(|(x, y)| (x - y).abs() < tolerance), "{a:?} is not {b:?}");
}

fn main() -> Result<()> {
    const HEADS: usize = 2;
    const ROWS: usize = 4;
    const DIM: usize = 16;
    let numbers = |size: [i64; 4], seed: usize| {
        let mut made = Array::new(size);
        made.data.iter_mut().enumerate().for_each(|(i, x)| *x = ((i * 7 + seed * 5) % 23) as f32 / 11.5 - 1.0);
        made
    };
    // Two sequences of 6 and 3 keys: pages 4 and 1, and page 2. The last row has no place.
    let lengths = [6, 3];
    let table = [4, 1, 2, -1];
    let slots: Vec<i64> = [16, 17, 18, 19, 4, 5, 8, 9, 10, -1].to_vec();
    let size = [1, HEADS as i64, slots.len() as i64, DIM as i64];
    let (k, v) = (numbers(size, 1), numbers(size, 2));
    let mut cache = PagedCache::new(5, HEADS as i64, ROWS as i64, DIM as i64)?;
    cache.append(&k, &v, &slots)?;

    let q = numbers([2, HEADS as i64, 1, DIM as i64], 3);
    let (out, lse) = cache.attend(&q, &Sequences { table: &table, columns: 2, lengths: &lengths })?;
    for (sequence, keys) in [(0, 0..6), (1, 6..9)] {
        for head in 0..HEADS {
            let of = |x: &'static str| if x == "k" { &k } else { &v };
            let rows = |x| keys.clone().map(|i| of(x).row(0, head, i)).collect::<Vec<_>>();
            let (wanted, total) = expected(q.row(sequence, head, 0), &rows("k"), &rows("v"));
            close(out.row(sequence, head, 0), &wanted, 1e-5);
            close(&lse[sequence * HEADS + head..][..1], &[total], 1e-5);
        }
    }
    println!("a paged cache: the same as written out");

    // The first sequence's pages one by one, joined.
    let one = Array { data: q.data[..HEADS * DIM].to_vec(), size: [1, HEADS as i64, 1, DIM as i64] };
    let part = |page: i32, keys: i32| cache.attend(&one, &Sequences { table: &[page], columns: 1, lengths: &[keys] });
    let (first, second) = (part(4, 4)?, part(1, 2)?);
    let (joined, total) = merge(&[(&first.0, &first.1), (&second.0, &second.1)])?;
    close(&joined.data, &out.data[..HEADS * DIM], 1e-5);
    close(&total, &lse[..HEADS], 1e-5);
    println!("two parts of its keys: joined, the same");

    let (codes, scales) = quantize(&k)?;
    let largest = k.data.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    assert!(codes.data.iter().any(|code| code & 0x7f == 0x7e) && scales.iter().all(|scale| scale * 448.0 <= largest * 1.0001));
    println!("codes of 8 bits: scales {scales:?}");

    println!("refused: {}", PagedCache::new(5, 2, 0, 16).err().ok_or("pages without rows are refused")?);
    Ok(())
}
