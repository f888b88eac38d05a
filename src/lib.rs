//! kvfs exposes the key-value cache of language models as files.
//!
//! The modules stand in the order in which the data flows: a [`page`] is the unit, [`ingest`]
//! proves that bytes are one, [`store`] keeps it, [`fs`] gives it a name, [`fuse`] shows it to
//! the kernel. `ARCHITECTURE.md` tells the way of a byte.

pub mod page;

pub mod store;

pub mod ingest;

pub mod fs;

pub mod fuse;

pub mod observe;

pub mod cli;

mod sys;
