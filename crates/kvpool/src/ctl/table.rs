//! Rows for people and for programs: one description of columns serves both outputs, so that they can't say different
//! things.

use comfy_table::presets::NOTHING;
use comfy_table::{ContentArrangement, Table};
use serde_json::Value;

/// How to print.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// Aligned columns, for people
    #[default]
    Table,
    /// A JSON array of objects with stable field names, for programs
    Json,
}

/// The rows of one `kvpool get`: each with its table cells and its JSON object.
pub struct Rows {
    /// Column titles in capitals, like kubectl's.
    pub columns: &'static [&'static str],
    pub rows: Vec<(Vec<String>, Value)>,
}

impl Rows {
    /// The whole output, with the newline at its end.
    pub fn render(self, output: Output, kind: &str) -> String {
        match output {
            Output::Json => {
                let array = Value::Array(self.rows.into_iter().map(|(_, json)| json).collect());
                format!("{array:#}\n")
            }
            Output::Table if self.rows.is_empty() => format!("no {kind}\n"),
            Output::Table => table(self.columns, self.rows.into_iter().map(|(cells, _)| cells)),
        }
    }
}

/// Columns without borders, two spaces apart.
pub fn table(columns: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_style(NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(columns.to_vec());
    for row in rows {
        // An empty cell would make columns hard to count for eyes and for awk.
        table.add_row(
            row.into_iter()
                .map(|cell| if cell.is_empty() { "-".to_owned() } else { cell }),
        );
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let mut out = table.trim_fmt();
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rows() -> Rows {
        let row = |name: &str, state: &str| (vec![name.to_owned(), state.to_owned()], json!({"name": name}));
        Rows {
            columns: &["NAME", "STATE"],
            rows: vec![row("shard-1", "Up"), row("s", "")],
        }
    }

    #[test]
    fn tables_are_aligned_and_have_no_empty_cells() {
        assert_eq!(
            rows().render(Output::Table, "shards"),
            "NAME     STATE\nshard-1  Up\ns        -\n"
        );
        let none = Rows {
            columns: &["NAME"],
            rows: vec![],
        };
        assert_eq!(none.render(Output::Table, "shards"), "no shards\n");
    }

    #[test]
    fn json_is_an_array() {
        let value: Value = serde_json::from_str(&rows().render(Output::Json, "shards")).unwrap();
        assert_eq!(value, json!([{"name": "shard-1"}, {"name": "s"}]));
        let none = Rows {
            columns: &["NAME"],
            rows: vec![],
        };
        assert_eq!(none.render(Output::Json, "shards").trim(), "[]");
    }
}
