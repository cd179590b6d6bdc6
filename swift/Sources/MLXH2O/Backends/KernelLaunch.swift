import Foundation
import MLX

/// A call of a custom kernel by the names of its buffers.
///
/// MLX writes a kernel's signature from the arrays that it gets, so a buffer that a launch does
/// without has no name there. Its declaration as a null pointer goes before the body instead, and the
/// template arguments say that nobody looks.
struct KernelLaunch {
    /// A kernel's buffers, in order.
    struct Interface: Sendable {
        /// Of its file in metal/.
        let name: String
        let inputs: [String]
        let outputs: [String]
        /// Those that a launch may do without, with the declarations that then stand in.
        var optional: [(name: String, declaration: String)] = []
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

    /// Declarations for optional inputs of floats.
    static func absentInputs(_ names: [String]) -> [(name: String, declaration: String)] {
        names.map { ($0, "const device float* \($0) = nullptr;") }
    }

    /// Declarations for optional outputs of floats.
    static func absentOutputs(_ names: [String]) -> [(name: String, declaration: String)] {
        names.map { ($0, "device float* \($0) = nullptr;") }
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

    /// Who runs launches in the place of Metal: in tests, who writes them down.
    @TaskLocal static var runner: (any KernelRunner)?

    /// Run the kernel; what it writes, by name.
    func run() -> [String: MLXArray] {
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
