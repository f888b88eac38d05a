//! Operations of a graph that something else takes the place of, while the graph is computed.

use std::ffi::c_int;
use std::mem::size_of;
use std::ptr;

use super::abi::{Custom, PARAMETERS, RawTensor};

/// Nodes that get their operations back when this is dropped.
#[derive(Default)]
pub(super) struct Replaced(Vec<Original>);

struct Original {
    node: *mut RawTensor,
    op: c_int,
    parameters: [i32; PARAMETERS],
}

impl Replaced {
    /// Makes a node call `custom`; `op` is the number of `GGML_OP_CUSTOM`.
    ///
    /// # Safety
    /// The node is a tensor of a graph that nobody else uses as long as this is there.
    pub(super) unsafe fn replace(&mut self, node: *mut RawTensor, op: c_int, custom: Custom) {
        const { assert!(size_of::<Custom>() <= size_of::<[i32; PARAMETERS]>()) };
        // SAFETY: the caller's.
        let tensor = unsafe { node.read() };
        self.0.push(Original { node, op: tensor.op, parameters: tensor.op_params });
        let mut parameters = [0; PARAMETERS];
        // SAFETY: the parameters are longer, and the engine reads them from there byte by byte.
        unsafe { ptr::write_unaligned(parameters.as_mut_ptr().cast(), custom) };
        // SAFETY: the caller's.
        unsafe { set(node, op, parameters) };
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        for original in self.0.drain(..) {
            // SAFETY: the promise of `replace`.
            unsafe { set(original.node, original.op, original.parameters) };
        }
    }
}

/// # Safety
/// The node is a tensor that nobody else uses meanwhile.
unsafe fn set(node: *mut RawTensor, op: c_int, parameters: [i32; PARAMETERS]) {
    // SAFETY: the caller's.
    unsafe { (*node).op = op };
    // SAFETY: the caller's.
    unsafe { (*node).op_params = parameters };
}
