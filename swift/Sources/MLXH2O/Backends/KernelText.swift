import Foundation

/// The text of a kernel, as compilers get it.
///
/// A `.metal` file holds functions and, after a line `//! body`, the body of the kernel itself, whose
/// signature MLX writes; between them its buffers are declared (``KernelLaunch/Interface``). Headers
/// are put in where they are included, since kernels are compiled from memory.
struct KernelText {
    let header: String
    /// The lines that declare the buffers.
    let declarations: Substring
    let body: String

    /// A kernel by the name of its file, without `.metal`.
    init(_ name: String) {
        let text = kernelFiles["\(name).metal"]!
        let buffers = text.range(of: "\n//! buffers\n")!, mark = text.range(of: "\n//! body\n")!
        var seen: Set<String> = []
        header = KernelText.included(
            "#include \"prelude_metal.h\"\n\(text[..<buffers.lowerBound])\n", &seen)
        declarations = text[buffers.upperBound ..< mark.lowerBound]
        body = String(text[mark.upperBound...])
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
