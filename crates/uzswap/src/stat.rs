//! `uzswap stat`: lists running groups, and prints their counters.

use crate::Failed;
use crate::cli::StatArgs;
use crate::group_name::components;
use crate::groups::{Registry, name_of, refresh};
use crate::output::print;
use crate::stat_files::{Content, Usage, files};
use serde_json::{Value, json};
use std::sync::atomic::Ordering::Relaxed;
use uzswap_pager::group::{GroupPage, NODES};

/// Prints what was asked for. The error is one sentence.
pub fn stat(args: &StatArgs) -> Result<(), Failed> {
    let registry = Registry::open()?;
    let Some(name) = &args.name else {
        let groups = list(&registry);
        let text = if args.json { pretty(&Value::Array(groups.json)) } else { groups.table };
        print(text.as_bytes())?;
        let closed = registry.closed();
        if !closed.is_empty() {
            say!(
                "uzswap: not shown, as this command does not have the capabilities that they were started with: {}",
                closed.join(", ")
            );
        }
        return Ok(());
    };
    components(name).map_err(Failed::Wrongly)?;
    let group = registry.find(name)?;
    group.refresh();
    let mut shown = files(group.page(), group.node);
    if let Some(missing) = args.files.iter().find(|file| !shown.iter().any(|(known, _)| known == *file)) {
        return Err(Failed::Wrongly(format!("no file is called `{missing}`: there are {}", known(&shown))));
    }
    if !args.files.is_empty() {
        shown.retain(|(name, _)| args.files.contains(name));
    } else if !args.json {
        // There are counters of eight orders, most of them idle.
        shown.retain(|(name, content)| !name.starts_with("hugepages-") || *content != Content::Number(0));
    }
    let text = match (args.json, &shown[..]) {
        (true, _) => pretty(&as_json(name, &shown)),
        (false, [(_, only)]) => only.text(),
        // Several files get headings as in head(1).
        (false, _) => {
            let parts: Vec<String> =
                shown.iter().map(|(name, content)| format!("==> {name} <==\n{}", content.text())).collect();
            parts.join("\n")
        }
    };
    Ok(print(text.as_bytes())?)
}

/// The names of all files; those that exist for each folio size are one entry.
fn known(files: &[(String, Content)]) -> String {
    let (sized, mut names): (Vec<&str>, Vec<&str>) =
        files.iter().map(|(name, _)| name.as_str()).partition(|name| name.starts_with("hugepages-"));
    let counters: Vec<&str> = sized.iter().filter_map(|name| name.strip_prefix("hugepages-64kB/stats/")).collect();
    let sizes = format!("hugepages-16kB/stats/FILE, to 2048kB, where FILE is one of {}", counters.join(", "));
    names.push(&sizes);
    names.join(", ")
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default() + "\n"
}

fn as_json(name: &str, files: &[(String, Content)]) -> Value {
    let files = files.iter().map(|(name, content)| (name.clone(), content.json()));
    json!({ "name": name, "files": Value::Object(files.collect()) })
}

struct List {
    table: String,
    json: Vec<Value>,
}

/// All groups, with their present charges.
///
/// The story: the list showed what members had last published. A member that fills memory far below its limit and then does
/// nothing publishes no more: the list showed 3 of 100 MiB, and `uzswap stat` of the group itself all.
fn list(registry: &Registry) -> List {
    let trees = registry.roots();
    refresh(&trees);
    let mut rows = vec![["GROUP", "PROCESSES", "CURRENT", "HIGH", "MAX"].map(str::to_owned)];
    let mut json = Vec::new();
    for tree in &trees {
        let page = tree.page();
        let mut nodes: Vec<(String, usize)> =
            (0..NODES).filter(|i| page.nodes[*i].is_ready()).map(|i| (name_of(page, i), i)).collect();
        nodes.sort();
        for (name, node) in nodes {
            json.push(as_json(&name, &files(page, node)));
            rows.push(row(page, name, node));
        }
    }
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: [usize; 5] = std::array::from_fn(width);
    let line = |row: &[String; 5]| {
        let mut line = format!("{:<1$}", row[0], widths[0]);
        for (cell, width) in row.iter().zip(widths).skip(1) {
            line.push_str(&format!("  {cell:>width$}"));
        }
        line + "\n"
    };
    List { table: rows.iter().map(line).collect(), json }
}

fn row(page: &GroupPage, name: String, node: usize) -> [String; 5] {
    let (usage, n) = (Usage::of(page, node), &page.nodes[node]);
    let limit = |bytes: u64| Content::Limit(bytes).text().trim_end().to_owned();
    [
        name,
        usage.pids.len().to_string(),
        usage.charge.to_string(),
        limit(n.high.load(Relaxed)),
        limit(n.max.load(Relaxed)),
    ]
}
