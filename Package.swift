// swift-tools-version: 6.1
import PackageDescription

// On Linux swift/Linux stands in for Apple's packages, so that everything builds and is tested
// without a Mac. MLX_H2O_PACKAGES=apple or =linux chooses otherwise.
#if os(Linux)
    let usual = "linux"
#else
    let usual = "apple"
#endif
let isLinux = (Context.environment["MLX_H2O_PACKAGES"] ?? usual) == "linux"

// What sources and tests import.
let mlx: [Target.Dependency] = [
    .product(name: "MLX", package: isLinux ? "Linux" : "mlx-swift"),
    .product(name: "MLXNN", package: isLinux ? "Linux" : "mlx-swift"),
    .product(name: "MLXLMCommon", package: isLinux ? "Linux" : "mlx-swift-lm"),
    .product(name: "MLXLLM", package: isLinux ? "Linux" : "mlx-swift-lm"),
]

// The example apps, which swift/Examples builds on a Mac, compile here too.
let examples: [Target] =
    isLinux
    ? [
        .target(
            name: "LocalTokenizers",
            dependencies: mlx + [.product(name: "Tokenizers", package: "Linux")],
            path: "swift/Examples/Chat/Sources/LocalTokenizers"),
        .executableTarget(
            name: "Chat", dependencies: ["MLXH2O", "LocalTokenizers"] + mlx,
            path: "swift/Examples/Chat/Sources/Chat"),
        .executableTarget(
            name: "ChatApp",
            dependencies: ["MLXH2O", "MLXH2OChecks", "LocalTokenizers"] + mlx
                + [.product(name: "SwiftUI", package: "Linux")],
            path: "swift/Examples/ChatApp", exclude: ["README.md"]),
    ] : []

// What Apple's systems have: of the library, and of its tests.
let pressure: [Target.Dependency] =
    isLinux ? [.product(name: "DispatchMemoryPressure", package: "Linux")] : []
let system = pressure + (isLinux ? [.product(name: "CryptoKit", package: "Linux")] : [])

let package = Package(
    name: "mlx-h2o",
    platforms: [.macOS(.v14), .iOS(.v17), .tvOS(.v17), .visionOS(.v1)],
    products: [
        .library(name: "MLXH2O", targets: ["MLXH2O"]),
        .library(name: "MLXH2OChecks", targets: ["MLXH2OChecks"]),
    ],
    dependencies: isLinux
        ? [.package(path: "swift/Linux")]
        : [
            // Swift 6.1 and 6.2 get 0.31.4: later versions are written for Swift 6.3.
            .package(url: "https://github.com/ml-explore/mlx-swift", "0.31.4" ..< "0.34.0"),
            .package(url: "https://github.com/ml-explore/mlx-swift-lm", "3.31.4" ..< "3.34.0"),
        ],
    targets: [
        // The engine, C++ over the mlx-c that the product MLX brings (c_api/src/mx.h): without MLX's
        // C++ headers, which Swift packages cannot see, and so without the CPU kernels.
        .target(
            name: "CMLXH2O",
            dependencies: [.product(name: "MLX", package: isLinux ? "Linux" : "mlx-swift")],
            path: "c_api",
            exclude: ["src/cpu", "src/cpu_kernels.cpp"],
            sources: ["src"],
            publicHeadersPath: "include",
            cxxSettings: [
                .headerSearchPath("src"),
                .define("MLX_H2O_OVER_MLX_C"),
                .define("MLX_H2O_VERSION", to: "\"0.1.0\""),
            ]),
        .target(
            name: "MLXH2O",
            dependencies: ["CMLXH2O"] + mlx + pressure,
            path: "swift/Sources/MLXH2O",
            resources: [.copy("PrivacyInfo.xcprivacy")],
            swiftSettings: isLinux ? [.define("STAND_INS")] : []),
        // What a device says of the kernels: for a test that an iPhone runs, and for a screen of an app.
        .target(
            name: "MLXH2OChecks",
            dependencies: ["MLXH2O"] + mlx,
            path: "swift/Sources/MLXH2OChecks"),
        .executableTarget(
            name: "h2o-step-overhead",
            dependencies: ["MLXH2O"] + mlx,
            path: "swift/Benchmarks/StepOverhead"),
        .testTarget(
            name: "MLXH2OTests",
            dependencies: ["MLXH2O", "CMLXH2O"] + mlx + system,
            path: "swift/Tests/MLXH2OTests",
            exclude: ["Fixtures"],
            // Golden vectors go with the tests onto a device.
            resources: [.copy("../../../golden")]),
        .testTarget(
            name: "MLXH2ODeviceTests",
            dependencies: ["MLXH2O", "MLXH2OChecks"] + mlx,
            path: "swift/Tests/MLXH2ODeviceTests"),
    ] + examples,
    cxxLanguageStandard: .cxx20
)
