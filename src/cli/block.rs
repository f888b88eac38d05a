//! `kvfs block`: what an engine that lays out its own file tells of it, and asks.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use super::arguments::{BlockCommand, BlockName};
use super::output::{Failure, Outcome, Report};
use crate::page::block_map::{BlockMap, parse_block};
use crate::page::{Layer, PrefixHash};
use crate::reader::{Block, register_block, unregister_block};

/// Registers, shows or withdraws.
pub(crate) fn run(command: &BlockCommand) -> Outcome {
    match command {
        BlockCommand::Register { name, map } => register(name, map),
        BlockCommand::Show { name } => show(name),
        BlockCommand::Unregister { name } => {
            let (hash, layer) = parse(name)?;
            if unregister_block(&name.model, &hash, layer).map_err(Failure::failed)? {
                return Ok(Report::default());
            }
            Err(Failure::failed(format!("{}: no such block is registered", name.block)))
        }
    }
}

fn parse(name: &BlockName) -> Result<(PrefixHash, Layer), Failure> {
    parse_block(&name.block).ok_or_else(|| {
        Failure::Usage(format!(
            "{:?}: name HASH.LAYER, 64 hexadecimal digits and 3 decimal ones",
            name.block
        ))
    })
}

fn register(name: &BlockName, map: &Path) -> Outcome {
    let (hash, layer) = parse(name)?;
    let explain = |error: io::Error| Failure::Failed(format!("{}: {error}", map.display()));
    let mut text = String::new();
    if map == Path::new("-") {
        io::stdin().read_to_string(&mut text).map_err(explain)?;
    } else {
        text = fs::read_to_string(map).map_err(explain)?;
    }
    let block: BlockMap = serde_json::from_str(&text).map_err(|error| explain(error.into()))?;
    if block.layer != layer.0 {
        let why = format!("the block's first layer is {}, not {layer}", block.layer);
        return Err(Failure::Usage(why));
    }
    register_block(&name.model, &hash, &block).map_err(Failure::failed)?;
    Ok(Report::default())
}

fn show(name: &BlockName) -> Outcome {
    let (hash, layer) = parse(name)?;
    match Block::find(&name.model, &hash, layer).map_err(Failure::failed)? {
        Some(block) => Ok(Report::json(&serde_json::json!(block.map()))),
        None => Err(Failure::failed(format!(
            "{}: no such block is registered, or its bytes are gone",
            name.block
        ))),
    }
}
