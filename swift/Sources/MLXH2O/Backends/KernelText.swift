import Foundation

/// The text of a kernel, as compilers get it.
///
/// A `.metal` file holds functions and, after a line `//! body`, the body of the kernel itself, whose
/// signature MLX writes. Headers are put in where they are included, since kernels are compiled from
/// memory.
struct KernelText {
    let header: String
    let body: String

    /// A kernel by the name of its file, without `.metal`.
    init(_ name: String) {
        let text = kernelFiles["\(name).metal"]!, mark = "\n//! body\n"
        let split = text.range(of: mark)!
        var seen: Set<String> = []
        header = KernelText.included(
            "#include \"prelude_metal.h\"\n\(text[..<split.lowerBound])\n", &seen)
        body = String(text[split.upperBound...])
    }

    /// Text with each header in place of its first `#include`, and no other.
    private static func included(_ text: String, _ seen: inout Set<String>) -> String {
        var whole = ""
        var lines = text.split(separator: "\n", omittingEmptySubsequences: false)[...]
        while let line = lines.popFirst() {
            let end = lines.isEmpty ? "" : "\n"
            guard line.hasPrefix("#include \""), line.hasSuffix(".h\""), !lines.isEmpty else {
                whole += line + end
                continue
            }
            let name = String(line.dropFirst(10).dropLast())
            if seen.insert(name).inserted { whole += included(kernelFiles[name]!, &seen) }
        }
        return whole
    }
}
