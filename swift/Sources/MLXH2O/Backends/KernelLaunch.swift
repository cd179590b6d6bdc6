import Foundation
import MLX

/// A call of a custom kernel by the names of its buffers.
///
/// MLX writes a kernel's signature from the arrays that it gets, so a buffer that a launch does
/// without has no name there. Its declaration as a null pointer goes before the body instead, and the
/// template arguments say that the kernel never reads it.
struct KernelLaunch {
    /// A kernel's buffers, in order, as its file in metal/ declares them.
    struct Interface: Sendable {
        /// Of its file in metal/.
        let name: String
        let inputs: [String]
        let outputs: [String]
        /// Those that a launch may do without, with the declarations that then stand in.
        let optional: [(name: String, declaration: String)]

        /// A line is `//! in NAME` or `//! out NAME`, and `optional TYPE strided` after it, without
        /// the last words where nothing has to stand in for them.
        init(_ name: String) {
            var names: [Substring: [String]] = [:]
            var optional: [(name: String, declaration: String)] = []
            for line in KernelText(name).declarations.split(separator: "\n") {
                let words = line.split(separator: " ")
                let (way, buffer) = (words[1], String(words[2]))
                names[way, default: []].append(buffer)
                guard words.count > 3 else { continue }
                var declaration = ""
                if words.count > 4 {
                    let const = way == "in" ? "const " : ""
                    declaration = "\(const)device \(words[4])* \(buffer) = nullptr;"
                }
                if words.count > 5 { declaration += "\nconst int64_t \(buffer)_strides[4] = {0};" }
                optional.append((buffer, declaration))
            }
            self.name = name
            (inputs, outputs) = (names["in"] ?? [], names["out"] ?? [])
            self.optional = optional
        }
    }

    /// What is to be written.
    struct Output {
        let name: String
        let shape: [Int]
        let dtype: DType

        init(_ name: String, _ shape: [Int], _ dtype: DType) {
            (self.name, self.shape, self.dtype) = (name, shape, dtype)
        }
    }

    /// Lanes of a simdgroup.
    static let simdgroup = 32

    let interface: Interface
    let inputs: [String: MLXArray]
    let outputs: [Output]
    let template: [(String, any KernelTemplateArg)]
    let threadgroups: (Int, Int, Int)
    /// Of each threadgroup, along x.
    let threads: Int

    var reads: [String] { interface.inputs.filter { inputs[$0] != nil } }

    /// One name for one text, since MLX keeps compiled kernels by name.
    var name: String {
        let passed = Set(reads + outputs.map(\.name))
        let features = interface.optional.map(\.name).filter(passed.contains)
        return (["mlx_h2o", interface.name] + features + ["\(threads)"]).joined(separator: "_")
    }

    var header: String {
        "#define THREADGROUP_SIZE \(threads)\n" + KernelText(interface.name).header
    }

    var source: String {
        let passed = Set(reads + outputs.map(\.name))
        let absent = interface.optional.filter { !passed.contains($0.name) }.map(\.declaration)
        return (absent + [KernelText(interface.name).body]).joined(separator: "\n")
    }

    /// Runs launches in the place of Metal; in tests, writes them down.
    @TaskLocal static var runner: (any KernelRunner)?

    /// Run the kernel; what it writes, by name.
    func run() -> [String: MLXArray] {
        guard reads.count == inputs.count else {
            let unknown = inputs.keys.filter { !interface.inputs.contains($0) }.sorted()
            fatalError("The kernel \(interface.name) declares no buffers \(unknown).")
        }
        let written = KernelLaunch.runner?.run(self) ?? onMetal()
        return Dictionary(uniqueKeysWithValues: zip(outputs.map(\.name), written))
    }

    private func onMetal() -> [MLXArray] {
        let reads = reads
        let key = BuiltKernels.Key(
            interface: interface.name, reads: reads, writes: outputs.map(\.name), threads: threads)
        let kernel = KernelLaunch.built.kernel(key) {
            MLXFast.metalKernel(
                name: name, inputNames: reads, outputNames: outputs.map(\.name), source: source,
                header: header, ensureRowContiguous: false)
        }
        return kernel(
            reads.map { inputs[$0]! }, template: template,
            grid: (threadgroups.0 * threads, threadgroups.1, threadgroups.2),
            threadGroup: (threads, 1, 1), outputShapes: outputs.map(\.shape),
            outputDTypes: outputs.map(\.dtype))
    }

    private static let built = BuiltKernels()

    /// Kernels by what makes their texts: those are long, and a step launches some in every layer.
    private final class BuiltKernels: @unchecked Sendable {
        struct Key: Hashable {
            let interface: String
            let reads: [String]
            let writes: [String]
            let threads: Int
        }

        private let lock = NSLock()
        private var kernels: [Key: MLXFast.MLXFastKernel] = [:]

        func kernel(_ key: Key, _ build: () -> MLXFast.MLXFastKernel) -> MLXFast.MLXFastKernel {
            lock.lock()
            defer { lock.unlock() }
            if let kernel = kernels[key] { return kernel }
            let kernel = build()
            kernels[key] = kernel
            return kernel
        }
    }
}

/// Runs launches.
protocol KernelRunner: Sendable {
    /// What a kernel writes, in the order of its outputs.
    func run(_ launch: KernelLaunch) -> [MLXArray]
}
