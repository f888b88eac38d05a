//! The library of kvfs for Python: thin over `kvfs-runtime` and `kvfs-page`.
//!
//! | file | question it answers |
//! |---|---|
//! | `model`, `sequence`, `page`, `prefix`, `tail` | what is in a mount |
//! | `layers`, `append`, `rows` | how do an engine's arrays become pages and tails |
//! | `attend` | attention over pages where they lie |
//! | `batch`, `workers` | many pages at once |
//! | `stream` | one layer after the other, the next one read ahead |
//! | `files`, `many` | many values in `files/` at once |
//! | `tensor`, `tokens` | what does Python hand over |
//! | `array`, `memory`, `element`, `dlpack` | what does it get, without a copy |
//! | `fork` | what does a child of the process leave alone |
//! | `errors` | what goes wrong |
//!
//! The interpreter is not held while a file is touched. Mounts are made and ended by the program, which the
//! package brings along (`python/package/kvfs/program.py`).

#![allow(clippy::doc_markdown, reason = "texts that Python shows have no marks for names")]
#![allow(clippy::needless_pass_by_value, reason = "what Python hands over is owned")]

mod append;
mod array;
mod attend;
mod batch;
mod dlpack;
mod element;
mod errors;
mod files;
mod fork;
mod layers;
mod many;
mod memory;
mod model;
mod page;
mod prefix;
mod rows;
mod sequence;
mod stream;
mod tail;
mod tensor;
mod tokens;
mod workers;

use pyo3::prelude::*;

use errors::exceptions;

#[pymodule]
fn _kvfs(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<array::Array>()?;
    module.add_class::<attend::Partials>()?;
    module.add_class::<files::Files>()?;
    module.add_class::<model::Match>()?;
    module.add_class::<model::Model>()?;
    module.add_class::<page::Page>()?;
    module.add_class::<prefix::Prefix>()?;
    module.add_class::<sequence::Sequence>()?;
    module.add_class::<stream::Part>()?;
    module.add_class::<stream::Stream>()?;
    module.add_function(wrap_pyfunction!(attend::attend, module)?)?;
    module.add_function(wrap_pyfunction!(batch::read_pages, module)?)?;
    module.add_function(wrap_pyfunction!(many::have_many, module)?)?;
    module.add_function(wrap_pyfunction!(many::read_many, module)?)?;
    module.add("Error", py.get_type::<exceptions::Error>())?;
    module.add("InvalidArgument", py.get_type::<exceptions::InvalidArgument>())?;
    module.add("Missing", py.get_type::<exceptions::Missing>())?;
    module.add("Changed", py.get_type::<exceptions::Changed>())?;
    module.add("Refused", py.get_type::<exceptions::Refused>())?;
    module.add("Busy", py.get_type::<exceptions::Busy>())?;
    module.add("Disconnected", py.get_type::<exceptions::Disconnected>())
}
